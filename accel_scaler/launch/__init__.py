"""``accel-scaler launch``: Accelerate's launcher, with settings, for an unchanged script.

A command line comes in; a config file without our section, an environment and Accelerate's own
launcher go out. In each process that it starts ``startup/sitecustomize.py`` meets the Accelerators
and Trainers that are made, and attaches them through ``attach_hook``. That process imports
``attach_hook`` alone, so nothing is handed out here: Accelerate's commands, which the launcher
needs, would come along.
"""
