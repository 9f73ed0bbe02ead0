//! Skipped tests: [`skip!`](crate::skip!) reports what a test needs and this machine lacks.
//! `cargo xtask test` names a log in [`LOG`], reads it with [`read`], and lists the skips at the
//! end of a green run; cargo hides the output of a passing test.

use std::collections::BTreeSet;
use std::fmt::{Arguments, Display, Formatter};
use std::io::Write;

/// The environment variable that names the log. Without it a skip is printed.
pub const LOG: &str = "FOLIO_SKIP_LOG";

const START: &str = "skipped: ";

/// The requirement of a skipped test.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Need {
    /// A CUDA device.
    Gpu,
    /// Files of the folder `shared` beside the repository, or files made from them.
    Shared,
    /// Third-party files that `cargo xtask test` downloads.
    Download,
    /// A part of the build, such as the embedded model.
    Build,
}

impl Need {
    pub const ALL: [Self; 4] = [Self::Gpu, Self::Shared, Self::Download, Self::Build];

    pub fn name(self) -> &'static str {
        match self {
            Self::Gpu => "GPU",
            Self::Shared => "../shared",
            Self::Download => "download",
            Self::Build => "build",
        }
    }

    /// A machine of continuous integration has the rest.
    pub fn may_lack_in_ci(self) -> bool {
        matches!(self, Self::Gpu | Self::Shared)
    }
}

/// A line of the log: `skipped: TEST: NEED: why`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Skip {
    pub need: Need,
    pub why: String,
    pub test: String,
}

impl Display for Skip {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        write!(f, "{START}{}: {}: {}", self.test, self.need.name(), self.why)
    }
}

impl Skip {
    /// `None`: not a line of the log.
    pub fn parse(line: &str) -> Option<Self> {
        let mut parts = line.strip_prefix(START)?.splitn(3, ": ");
        let (test, need, why) = (parts.next()?, parts.next()?, parts.next()?);
        let need = Need::ALL.into_iter().find(|known| known.name() == need)?;
        Some(Self { need, why: why.to_owned(), test: test.to_owned() })
    }
}

/// The skips of a log, each once. Otherwise, a line that is no skip.
pub fn read(log: &str) -> Result<BTreeSet<Skip>, String> {
    log.lines().map(|line| Skip::parse(line).ok_or_else(|| line.to_owned())).collect()
}

/// Records that the running test is skipped. The caller returns afterwards.
///
/// ```no_run
/// fn trial_of_a_device(num_devices: usize) {
///     if num_devices == 0 {
///         return folio_testing::skip!(Gpu, "this machine has no CUDA device");
///     }
/// }
/// # trial_of_a_device(1);
/// ```
#[macro_export]
macro_rules! skip {
    ($need:ident, $($why:tt)+) => {
        $crate::skip::record(module_path!(), $crate::skip::Need::$need, format_args!($($why)+))
    };
}

/// For [`skip!`](crate::skip!): `module` is its caller's.
pub fn record(module: &str, need: Need, why: Arguments<'_>) {
    let skip = Skip { need, why: why.to_string().replace('\n', " "), test: test_name(module) };
    let Some(log) = std::env::var_os(LOG) else { return eprintln!("{skip}") };
    let file = std::fs::OpenOptions::new().create(true).append(true).open(log);
    // One write for each line: the tests of many processes append to the log.
    let written = file.and_then(|mut file| file.write_all(format!("{skip}\n").as_bytes()));
    written.unwrap_or_else(|error| panic!("could not write the log that {LOG} names: {error}"));
}

/// The test harness names a test's thread for the test.
fn test_name(module: &str) -> String {
    let krate = module.split("::").next().unwrap_or(module);
    match std::thread::current().name() {
        Some(test) if test != "main" => format!("{krate}::{test}"),
        _ => module.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_read_as_they_were_written() {
        for need in Need::ALL {
            let skip = Skip { need, why: "models/a: not found: b".into(), test: test_name(module_path!()) };
            assert_eq!(skip.test, "folio_testing::skip::tests::lines_are_read_as_they_were_written");
            assert_eq!(Skip::parse(&skip.to_string()), Some(skip));
        }
        let line = "skipped: a::b: GPU: no CUDA device";
        assert_eq!(read(&format!("{line}\n{line}\n")).expect("skips").len(), 1);
        for wrong in ["", "skipped: a::b: no CUDA device", "skipped: a: moon: full", "a: GPU: no"] {
            assert_eq!(read(&format!("{line}\n{wrong}\n")), Err(wrong.to_owned()));
        }
    }
}
