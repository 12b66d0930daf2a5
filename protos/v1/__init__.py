"""Version 1 of the contract (package `chairlift.v1`). Fields are only ever added."""
