"""What verbs put together from several rooms: a run that is trained, a plan for serving, a run as the dashboard shows it."""
