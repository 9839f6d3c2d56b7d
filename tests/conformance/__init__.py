"""What every kind of a seam must do, run against each."""
