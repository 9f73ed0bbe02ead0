//! A name for every request, made here. Inside, nothing else names a request: what a client calls
//! it is only echoed and logged, so that no client can touch another's request by choosing its
//! name. Ids are unique, not secret.

use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use axum::http::{HeaderMap, HeaderName, HeaderValue};

pub const X_REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestId {
    /// Ours: 24 hexadecimal digits, unique across restarts.
    pub id: Arc<str>,
    /// The client's word for it, if it sent a sound one: visible ASCII, never used as a key.
    pub client: Option<Arc<str>>,
}

impl RequestId {
    /// The id in the answer's header.
    pub fn header(&self) -> HeaderValue {
        let shown = self.client.as_ref().unwrap_or(&self.id);
        HeaderValue::from_str(shown).unwrap_or_else(|_| unreachable!("both names are visible ASCII"))
    }
}

/// Makes ids: the second of the start, 32 random bits of this process, a counter.
#[derive(Debug)]
pub struct RequestIds {
    prefix: String,
    counter: AtomicU64,
    client_bytes: usize,
}

impl RequestIds {
    /// `client_bytes`: the longest name of a client's that is echoed.
    pub fn new(client_bytes: usize) -> Self {
        let started = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        // Seeded by the operating system; the only randomness needed here, so no crate for it.
        let random = RandomState::new().hash_one(std::process::id());
        let prefix = format!("{:08x}{:08x}", started as u32, random as u32);
        Self { prefix, counter: AtomicU64::new(0), client_bytes }
    }

    pub fn next(&self, headers: &HeaderMap) -> RequestId {
        let count = self.counter.fetch_add(1, Ordering::Relaxed);
        let id = format!("{}{count:08x}", self.prefix).into();
        RequestId { id, client: self.client_name(headers) }
    }

    fn client_name(&self, headers: &HeaderMap) -> Option<Arc<str>> {
        let mut names = headers.get_all(X_REQUEST_ID).iter();
        let (name, None) = (names.next()?.as_bytes(), names.next()) else { return None };
        let sound = (1..=self.client_bytes).contains(&name.len()) && name.iter().all(u8::is_ascii_graphic);
        sound.then(|| std::str::from_utf8(name).ok().map(Arc::from))?
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    fn client_name_of(names: &[&[u8]]) -> Option<Arc<str>> {
        let mut headers = HeaderMap::new();
        for name in names {
            headers.append(X_REQUEST_ID, HeaderValue::from_bytes(name).unwrap());
        }
        RequestIds::new(128).next(&headers).client
    }

    #[test]
    fn ids_are_unique_here_and_across_restarts() {
        let (first, second) = (RequestIds::new(128), RequestIds::new(128));
        let headers = HeaderMap::new();
        let ids = (0..1000).flat_map(|_| [first.next(&headers).id, second.next(&headers).id]);
        let ids: HashSet<_> = ids.collect();
        assert_eq!(ids.len(), 2000);
        assert!(ids.iter().all(|id| id.len() == 24 && id.bytes().all(|byte| byte.is_ascii_hexdigit())));
    }

    #[test]
    fn a_client_s_name_is_echoed_if_it_is_sound() {
        assert_eq!(client_name_of(&[b"abc-1/2"]).as_deref(), Some("abc-1/2"));
        assert_eq!(client_name_of(&[&[b'x'; 128]]).unwrap().len(), 128);
        let too_long: &[u8] = &[b'x'; 129];
        let unsound: [&[&[u8]]; 6] = [&[], &[b""], &[too_long], &[b"a b"], &["é".as_bytes()], &[b"a", b"b"]];
        for names in unsound {
            assert_eq!(client_name_of(names), None, "{names:?}");
        }
    }

    #[test]
    fn the_client_sees_its_own_name_or_ours() {
        let mut headers = HeaderMap::new();
        let ids = RequestIds::new(128);
        let ours = ids.next(&headers);
        assert_eq!(ours.header(), &*ours.id);
        headers.insert(X_REQUEST_ID, HeaderValue::from_static("mine"));
        let named = ids.next(&headers);
        assert_eq!(named.header(), "mine");
        assert_ne!(&*named.id, "mine");
    }
}
