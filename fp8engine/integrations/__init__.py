"""Other people's trainers, a file each: nothing in the engine imports these, and each imports its trainer."""
