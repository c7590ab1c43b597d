"""The frozen model: found, checked, loaded in the machine's arithmetic, and taught to read packed rows."""
