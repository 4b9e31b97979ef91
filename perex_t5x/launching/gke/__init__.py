"""JobSets on Google Kubernetes Engine."""
