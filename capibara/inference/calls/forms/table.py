"""The table of all forms."""

from __future__ import annotations

from capibara.inference.calls.forms import (
    elements,
    harmony,
    json_objects,
    literal_arguments,
    muse,
    named,
    solar,
    tagged,
    xtml,
)
from capibara.inference.calls.forms.form import Evidence, Form

# A model has the first form that it shows: a marker of one form may be a part of another's template.
FORMS = (
    *harmony.FORMS, *muse.FORMS, *solar.FORMS, *xtml.FORMS, *literal_arguments.FORMS, *named.FORMS, *elements.FORMS, *tagged.FORMS,
    *json_objects.FORMS,
)  # fmt: skip


def form_of(model: Evidence) -> Form | None:
    """The form of a model's calls; None: in no known form."""
    return next((form for form in FORMS if form.detect(model)), None)
