"""Distillation: a student learns the distributions of a teacher.

`distill_objective.py` is the objective, `on_policy.py` has answers that the student writes itself, `teacher_outputs.py`
divergences, hidden states and cached outputs. `other_tokenizer.py` aligns a teacher that has another tokenizer,
`teacher_checks.py` checks the run file.
"""
