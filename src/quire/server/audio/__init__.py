"""Speech: sounds that are written down, in their own language or in English."""
