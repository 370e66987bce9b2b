"""What a run tells about itself: phase times, the run directory, the display on rank 0."""
