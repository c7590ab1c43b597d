"""What a regime learned, in formats that other programs load: PEFT folders, llama.cpp adapters, merged models."""
