"""Between devices: groups of them, and what they tell each other while they compute."""
