"""Stories in plain words, played on a virtual clock with the functions of the core."""
