//! The check of the address that the server listens on.

use std::net::IpAddr;

use super::SetupError;

/// An address that other machines reach needs API keys, unless the operator waives them.
pub fn check_exposure(bound: IpAddr, has_keys: bool, insecure_no_auth: bool) -> Result<(), SetupError> {
    if has_keys || insecure_no_auth || bound.to_canonical().is_loopback() {
        return Ok(());
    }
    Err(SetupError::Exposed(bound))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_loopback_goes_without_keys() {
        let check = |address: &str, keys, insecure| check_exposure(address.parse().unwrap(), keys, insecure).is_ok();
        for loopback in ["127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1"] {
            assert!(check(loopback, false, false), "{loopback}");
        }
        for reachable in ["0.0.0.0", "::", "10.0.0.1", "192.168.1.4", "8.8.8.8", "fe80::1", "::ffff:0.0.0.0"] {
            assert!(!check(reachable, false, false), "{reachable}");
            assert!(check(reachable, true, false), "{reachable} with a key");
            assert!(check(reachable, false, true), "{reachable} waived");
        }
    }

    #[test]
    fn the_refusal_says_what_to_do() {
        let text = check_exposure("0.0.0.0".parse().unwrap(), false, false).unwrap_err().to_string();
        for way_out in ["0.0.0.0", "--api-key-file", "FOLIO_API_KEY", "127.0.0.1", "--insecure-no-auth"] {
            assert!(text.contains(way_out), "{way_out} in {text}");
        }
    }
}
