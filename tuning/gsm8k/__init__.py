"""GSM8K: the data pinned by hash, the protocols by name, how an answer is read, and a run that resumes."""
