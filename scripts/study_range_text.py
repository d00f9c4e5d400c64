"""The words of docs/study_range.md; its tables are made by study_range_report."""

HEAD = """# What fills the clip range, and which range learns

`python scripts/study_range.py` makes this page: {settings}. What the names mean is in [gspo.md](gspo.md)."""

READING = """## What the data say

To be written."""

TABLES = """## How to read the tables"""

LIMITS = """## What they cannot say"""
