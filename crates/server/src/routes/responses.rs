//! `/v1/responses`.

/// Responses kept for `previous_response_id`.
pub struct ResponseStore;

impl ResponseStore {
    pub fn new(_most: usize, _most_bytes: usize) -> Self {
        Self
    }
}
