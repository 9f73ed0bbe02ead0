//! A folder that gets its name only when it is complete.

use std::fs;
use std::path::{Path, PathBuf};

use crate::{Error, Result};

/// `OUT.part` until [`Staging::finish`]; removed on drop otherwise.
#[derive(Debug)]
pub struct Staging {
    out: PathBuf,
    part: PathBuf,
    replaces: bool,
    finished: bool,
}

impl Staging {
    /// `replaces`: an existing folder is replaced at the end.
    pub fn create(out: &Path, replaces: bool) -> Result<Self> {
        if out.exists() && !replaces {
            return Err(Error::File { path: out.to_owned(), problem: "is there already".to_owned() });
        }
        let part = beside(out, ".part");
        // Remains of an earlier run.
        if part.exists() {
            fs::remove_dir_all(&part).map_err(|source| Error::Io { path: part.clone(), source })?;
        }
        fs::create_dir_all(&part).map_err(|source| Error::Io { path: part.clone(), source })?;
        Ok(Self { out: out.to_owned(), part, replaces, finished: false })
    }

    pub fn path(&self) -> &Path {
        &self.part
    }

    pub fn finish(mut self) -> Result<()> {
        let io = |source| Error::Io { path: self.out.clone(), source };
        let old = beside(&self.out, ".old");
        let had = self.replaces && self.out.exists();
        if had {
            fs::rename(&self.out, &old).map_err(io)?;
        }
        fs::rename(&self.part, &self.out).map_err(io)?;
        if had {
            let gone = if old.is_dir() { fs::remove_dir_all(&old) } else { fs::remove_file(&old) };
            gone.map_err(|source| Error::Io { path: old.clone(), source })?;
        }
        self.finished = true;
        Ok(())
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        if !self.finished {
            let _ = fs::remove_dir_all(&self.part);
        }
    }
}

fn beside(path: &Path, ending: &str) -> PathBuf {
    // Without a slash at the end, which would put it inside.
    let mut name = path.components().as_path().as_os_str().to_owned();
    name.push(ending);
    name.into()
}
