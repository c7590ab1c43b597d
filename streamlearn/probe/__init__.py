"""What a transient expert tells about new data: which stable experts resemble it and which weights matter to it."""
