"""Speech: transcription and translation of audio."""
