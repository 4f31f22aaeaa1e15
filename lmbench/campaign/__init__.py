"""What starts runs and looks at them: sweeps, repeats, rounds of two sides until the verdict, tunings."""
