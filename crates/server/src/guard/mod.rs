//! Who is let in, and how many at once.
