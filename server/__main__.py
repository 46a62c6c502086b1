"""`python -m server`: the same as `msdg-vllm serve`, see `server.launcher`."""

from server.launcher import main

if __name__ == "__main__":
    main()
