"""Where the wings meet: benchmarks, the emulated fabric, the demo, and their records."""
