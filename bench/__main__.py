"""`python -m bench`: every benchmark, one after the other, alone on the machine."""

from bench import main_job

if __name__ == "__main__":
    main_job.main()
