"""`python -m server`: see `server.launcher`."""

from server.launcher import main

if __name__ == "__main__":
    main()
