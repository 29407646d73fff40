"""A run file of four answers: which text, what to learn, from which model, how long on which machine."""

from artel.planning.new.answers import Answers
from artel.planning.new.questions import Given, answer_questions
from artel.planning.new.write import run_file

__all__ = ["Answers", "Given", "answer_questions", "run_file"]
