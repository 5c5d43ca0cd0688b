"""All statements, in the order in which they rest on each other.

To add one, write a function like those in the files here and add it to :data:`STATEMENTS`: a
:class:`~dynorm.paper.proof.statement.Statement` with one ``step`` or ``then`` per line of the proof.
``dynorm prove --only NAME`` then proves it, checks it with numbers and prints it.
"""

from dynorm.paper.proof.statement import Statement
from dynorm.paper.proof.statements import (
    closed_forms,
    derivative,
    note,
    solutions,
)
from dynorm.paper.proof.vocabulary import as_written

with as_written():
    STATEMENTS: tuple[Statement, ...] = (
        derivative.reduction(),
        derivative.theorem_1(),
        derivative.equation_7(),
        derivative.equation_8(),
        solutions.theorem_2(),
        solutions.theorem_3(),
        solutions.theorem_4(),
        solutions.equation_15(),
        solutions.appendix_b(),
        note.note_centering(),
        note.note_rmsnorm(),
        closed_forms.closed_form_1(),
        closed_forms.closed_form_2(),
        closed_forms.closed_form_3(),
        closed_forms.closed_form_4(),
        closed_forms.closed_form_5(),
        closed_forms.witness_derivative(),
    )
