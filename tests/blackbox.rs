//! Starts the binary and looks at what it does.
