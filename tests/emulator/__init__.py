"""A card made of NumPy: it executes the PTX that Triton compiles for a GPU, and faults where a card fails or races."""
