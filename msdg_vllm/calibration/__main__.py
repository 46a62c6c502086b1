"""`python -m msdg_vllm.calibration`, the same as `msdg-vllm calibrate`."""

from msdg_vllm.calibration.command import main

raise SystemExit(main())
