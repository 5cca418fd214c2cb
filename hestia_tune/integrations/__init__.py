"""QAT in the training loops of other libraries; each module needs the library of its name."""
