"""JobSets on Google Kubernetes Engine: `launch/gke.py`."""
