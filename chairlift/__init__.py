"""What a person types: the command line that starts the services, asks them, and fetches models.

It knows the contract and rpc. Services are started as processes, never imported.
"""
