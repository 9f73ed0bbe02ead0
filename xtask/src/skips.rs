//! Skips: stages and tests that could not run on this machine. A run lists them at its end. On a
//! machine of continuous integration (`CI=true`) a stage that cannot run fails, and so does a test
//! that lacks more than a GPU or the folder `shared`.

use std::path::Path;

use anyhow::{Context, Result, bail};
use folio_testing::skip;

#[derive(Debug, Default, PartialEq)]
pub struct Skips(Vec<String>);

pub fn is_ci() -> bool {
    means_ci(std::env::var("CI").ok().as_deref())
}

fn means_ci(variable: Option<&str>) -> bool {
    !matches!(variable, None | Some("" | "0" | "false"))
}

impl Skips {
    pub fn none() -> Self {
        Self::default()
    }

    /// `stage` cannot run here.
    pub fn stage(stage: &str, why: &str) -> Result<Self> {
        Self::of_stage(stage, why, is_ci())
    }

    fn of_stage(stage: &str, why: &str, is_ci: bool) -> Result<Self> {
        if is_ci {
            bail!("{stage} cannot run, and with CI=true nothing is skipped: {why}");
        }
        Ok(Self(vec![format!("skipped: {stage}: {why}")]))
    }

    /// The skips that tests wrote to this log.
    pub fn tests(log: &Path) -> Result<Self> {
        let text = match std::fs::read_to_string(log) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => String::new(),
            text => text.with_context(|| log.display().to_string())?,
        };
        Self::of_tests(&text, is_ci())
    }

    fn of_tests(log: &str, is_ci: bool) -> Result<Self> {
        let skips = match skip::read(log) {
            Ok(skips) => skips,
            Err(line) => bail!("expected `skipped: TEST: NEED: why` in the log of skipped tests, found {line}"),
        };
        let list = |skips: Vec<&skip::Skip>| skips.iter().map(ToString::to_string).collect::<Vec<_>>();
        let refused = list(skips.iter().filter(|skip| is_ci && !skip.need.may_lack_in_ci()).collect());
        if !refused.is_empty() {
            bail!("with CI=true these tests must run:\n  {}", refused.join("\n  "));
        }
        Ok(Self(list(skips.iter().collect())))
    }

    pub fn add(&mut self, mut more: Self) {
        self.0.append(&mut more.0);
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The list for the end of a run.
    pub fn to_text(&self) -> String {
        match self.0.len() {
            0 => "nothing was skipped".to_owned(),
            count => format!("{}\n{count} skipped", self.0.join("\n")),
        }
    }

    /// Prints the skips of a single command, if there are any.
    pub fn print(&self) {
        if !self.is_empty() {
            eprintln!("{}", self.to_text());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GPU: &str = "skipped: a::b: GPU: this machine has no CUDA device";
    const SHARED: &str = "skipped: a::c: ../shared: no models/folio-rust-7m";
    const DOWNLOAD: &str = "skipped: a::d: download: no llama.cpp";

    #[test]
    fn ci_is_named_by_its_variable() {
        assert!(means_ci(Some("true")) && means_ci(Some("1")));
        assert!(!means_ci(None) && !means_ci(Some("")) && !means_ci(Some("false")) && !means_ci(Some("0")));
    }

    #[test]
    fn a_stage_that_cannot_run_fails_in_ci_and_is_listed_elsewhere() {
        let mut skips = Skips::of_stage("aarch64", "no emulator", false).unwrap();
        skips.add(Skips::none());
        assert_eq!(skips.to_text(), "skipped: aarch64: no emulator\n1 skipped");
        let error = Skips::of_stage("aarch64", "no emulator", true).unwrap_err().to_string();
        assert!(error.contains("aarch64 cannot run") && error.contains("no emulator"), "{error}");
        assert_eq!(Skips::none().to_text(), "nothing was skipped");
    }

    #[test]
    fn ci_may_lack_a_gpu_and_the_shared_folder_only() {
        let log = format!("{GPU}\n{SHARED}\n{GPU}\n");
        for is_ci in [false, true] {
            assert_eq!(Skips::of_tests(&log, is_ci).unwrap().0, [GPU, SHARED]);
        }
        let log = format!("{log}{DOWNLOAD}\n");
        assert_eq!(Skips::of_tests(&log, false).unwrap().0.len(), 3);
        let error = Skips::of_tests(&log, true).unwrap_err().to_string();
        assert!(error.contains(DOWNLOAD) && !error.contains(GPU), "{error}");
        assert!(Skips::of_tests("a line of something else\n", false).is_err());
        assert_eq!(Skips::of_tests("", true).unwrap(), Skips::none());
    }
}
