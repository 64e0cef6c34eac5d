"""``accel-scaler launch``: Accelerate's launcher, with settings, for an unchanged script.

The launcher gives Accelerate's own launcher a config file without our section, and an environment.
In each process ``startup/sitecustomize.py`` attaches new Accelerators and Trainers through
``attach_hook``. Nothing is handed out here: a process that imports ``attach_hook`` needs none of
Accelerate's commands, which the launcher imports.
"""
