"""The pure computation of a step: no devices, no jit."""
