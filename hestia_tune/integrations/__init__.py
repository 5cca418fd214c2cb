"""QAT in other people's training loops; each module needs the library that it is named after."""
