//! API keys, and checks that no address without keys can be reached from other machines.

use std::net::IpAddr;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use folio_server::guard::{self, Keys};
use folio_server::observe::{Observer, Refusal};

use crate::args::{AccessArgs, ServeArgs};

/// Environment variables that hold keys.
const VARIABLES: [&str; 2] = ["FOLIO_API_KEY", "VLLM_API_KEY"];
/// Maximum characters of a refused path in the log.
const LOGGED_PATH_CHARS: usize = 128;

pub struct Access {
    pub keys: Keys,
    /// The files and variables that hold the keys, for the greeting.
    pub sources: Vec<String>,
    pub warnings: Vec<String>,
    insecure_no_auth: bool,
}

impl Access {
    pub fn of(args: &AccessArgs) -> Result<Self> {
        if args.api_key.is_some() {
            bail!(
                "--api-key: every user of this machine can read a command line, and shells record it; put the key into \
                 a file and give --api-key-file FILE, or into the environment as FOLIO_API_KEY"
            );
        }
        let mut access = Self {
            keys: Keys::none(),
            sources: Vec::new(),
            warnings: Vec::new(),
            insecure_no_auth: args.insecure_no_auth,
        };
        if let Some(path) = &args.api_key_file {
            access.warnings.extend(access.keys.add_file(path).context("--api-key-file")?);
            access.sources.push(path.display().to_string());
        }
        for variable in VARIABLES {
            match std::env::var(variable) {
                Ok(list) if !list.is_empty() => {
                    access.keys.add_list(&list).context(variable)?;
                    access.sources.push(variable.to_string());
                }
                Ok(_) | Err(std::env::VarError::NotPresent) => {}
                Err(_) => bail!("{variable} is not UTF-8"),
            }
        }
        Ok(access)
    }

    /// Refuses addresses that other machines can reach without a key, unless `--insecure-no-auth`
    /// is given.
    pub fn check_all(&self, args: &ServeArgs) -> Result<()> {
        if args.listen.uds.is_none() {
            guard::check_exposure(args.listen.host, !self.keys.is_empty(), self.insecure_no_auth).context("--host")?;
        }
        if let Some(address) = args.listen.metrics_listen
            && !self.insecure_no_auth
            && !address.ip().to_canonical().is_loopback()
        {
            bail!(
                "--metrics-listen {address}: this address needs no key; give a loopback address, read /metrics at the \
                 server's own address with a key, or accept the risk with --insecure-no-auth"
            );
        }
        let endpoints = [
            ("--kv-events-endpoint", &args.kv_events.kv_events_endpoint),
            ("--kv-events-replay-endpoint", &args.kv_events.kv_events_replay_endpoint),
        ];
        for (flag, endpoint) in endpoints {
            if let Some(endpoint) = endpoint
                && !self.insecure_no_auth
                && self.keys.is_empty()
                && !is_loopback(endpoint)
            {
                bail!(
                    "{flag} {endpoint}: events carry the token ids of every prompt, and this address needs no key; \
                     give tcp://127.0.0.1:PORT, protect the server with API keys and this address with \
                     a firewall, or accept the risk with --insecure-no-auth"
                );
            }
        }
        Ok(())
    }

    /// A warning about events that other machines can read although the server has keys.
    pub fn event_warning(&self, args: &ServeArgs) -> Option<String> {
        let endpoint = args.kv_events.kv_events_endpoint.as_ref().filter(|endpoint| !is_loopback(endpoint))?;
        Some(format!("every client of {endpoint} can read the token ids of all prompts: ZeroMQ has no keys"))
    }
}

/// Whether `tcp://host:port` is a loopback address. Malformed endpoints are refused when bound.
fn is_loopback(endpoint: &str) -> bool {
    let Some((host, _)) = endpoint.strip_prefix("tcp://").and_then(|address| address.rsplit_once(':')) else {
        return false;
    };
    let host = host.trim_start_matches('[').trim_end_matches(']');
    host == "localhost" || host.parse::<IpAddr>().is_ok_and(|address| address.to_canonical().is_loopback())
}

/// Reports a request that the guard refused to the log and the metrics.
pub fn note_refusal(observer: &Observer, refusal: &guard::Refusal<'_>) {
    let end = refusal.path.char_indices().nth(LOGGED_PATH_CHARS).map_or(refusal.path.len(), |(end, _)| end);
    observer.refused(&Refusal {
        route: &refusal.path[..end],
        request_id: &refusal.id.id,
        key_name: refusal.caller.map(|caller| &*caller.name),
        status: refusal.error.status().as_u16(),
        code: refusal.error.code(),
        arrived: Instant::now(),
    });
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::args::{Command, Folio};

    /// The page must not show commands that are refused.
    #[test]
    fn the_commands_of_the_page_on_events_are_taken() {
        let keys = std::env::temp_dir().join(format!("folio-events-keys-{}", std::process::id()));
        std::fs::write(&keys, "a-key-of-enough-letters\n").expect("writable");
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt;
            std::fs::set_permissions(&keys, std::fs::Permissions::from_mode(0o600)).expect("it is ours");
        }
        let page = include_str!("../../../../docs/kv-events.md").replace("\\\n", " ");
        let commands: Vec<&str> = page.lines().filter_map(|line| line.strip_prefix("    folio serve ")).collect();
        assert!(!commands.is_empty());
        for command in commands {
            let command = command.replace("/etc/folio/keys", keys.to_str().expect("UTF-8")).replace(['\'', '"'], "");
            let words = ["folio", "serve"].into_iter().chain(command.split_whitespace());
            let line = Folio::try_parse_from(words).unwrap_or_else(|error| panic!("{command}: {error}"));
            let Command::Serve(args) = line.command else { unreachable!("the command is serve") };
            let checked = Access::of(&args.access).and_then(|access| access.check_all(&args));
            checked.unwrap_or_else(|error| panic!("{command}: {error:#}"));
        }
        std::fs::remove_file(&keys).expect("it is there");
    }

    #[test]
    fn endpoints_that_stay_on_this_machine() {
        for inside in ["tcp://127.0.0.1:5557", "tcp://localhost:0", "tcp://[::1]:5557", "tcp://127.9.9.9:1"] {
            assert!(is_loopback(inside), "{inside}");
        }
        for outside in ["tcp://*:5557", "tcp://0.0.0.0:5557", "tcp://10.0.0.1:1", "tcp://[::]:1", "tcp://host:1", "x"] {
            assert!(!is_loopback(outside), "{outside}");
        }
    }
}
