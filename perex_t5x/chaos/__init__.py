"""Does a run survive? `python -m perex_t5x.chaos` kills and damages real runs, resumes them, and compares."""
