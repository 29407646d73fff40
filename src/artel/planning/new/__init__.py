"""Write a run file from four answers: the text, the task, the model, and the time on a machine (`artel new`)."""

from artel.planning.new.questions import Answers, PresetAnswers, answer_questions
from artel.planning.new.run_file_text import format_run_file

__all__ = ["Answers", "PresetAnswers", "answer_questions", "format_run_file"]
