//! What the server tells of itself: metrics, logs, traces.
