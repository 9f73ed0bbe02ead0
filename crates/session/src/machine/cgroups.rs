//! Memory limits of control groups: those of this process's own group and of every group above it,
//! in the old hierarchy, the unified one, or both.
//!
//! The position of a group follows from two tables: `/proc/self/cgroup` has its path in each
//! hierarchy, and `/proc/self/mountinfo` lists the mounted parts of hierarchies. A container may
//! see only a part.

use std::fs;
use std::path::{Path, PathBuf};

/// The rest of the tightest of all limits, in bytes; none without a limit. `root` is `/`, or a
/// test's folder in its place.
pub fn room(root: &Path) -> Option<u64> {
    let groups = fs::read_to_string(root.join("proc/self/cgroup")).ok()?;
    let mounts = fs::read_to_string(root.join("proc/self/mountinfo")).ok()?;
    let hierarchies: Vec<Hierarchy> = mounts.lines().filter_map(Hierarchy::of).collect();
    let levels = groups.lines().filter_map(Group::of).flat_map(|group| {
        let mounted = hierarchies.iter().filter(move |hierarchy| hierarchy.is_unified == group.is_unified);
        mounted.flat_map(move |hierarchy| hierarchy.levels(root, &group.path))
    });
    levels.filter_map(|level| level.room()).min()
}

/// A line of `/proc/self/cgroup` that is about memory.
struct Group {
    is_unified: bool,
    path: PathBuf,
}

impl Group {
    /// `0::/path` is the unified hierarchy's, `4:memory,cpu:/path` an old one's.
    fn of(line: &str) -> Option<Self> {
        let (_, rest) = line.split_once(':')?;
        let (controllers, path) = rest.split_once(':')?;
        let is_unified = controllers.is_empty();
        let is_ours = is_unified || controllers.split(',').any(|controller| controller == "memory");
        is_ours.then(|| Self { is_unified, path: path.into() })
    }
}

/// A part of a hierarchy that is mounted somewhere.
struct Hierarchy {
    is_unified: bool,
    /// The group that is seen at the mount point.
    top: PathBuf,
    mount_point: PathBuf,
}

impl Hierarchy {
    /// `36 25 0:30 /top /mount/point rw,nosuid shared:9 - cgroup cgroup rw,memory`.
    fn of(line: &str) -> Option<Self> {
        let (before, after) = line.split_once(" - ")?;
        let mut kind = after.split(' ');
        let is_unified = match kind.next()? {
            "cgroup2" => true,
            "cgroup" if kind.nth(1)?.split(',').any(|option| option == "memory") => false,
            _ => return None,
        };
        let mut fields = before.split(' ').skip(3).map(unescaped);
        Some(Self { is_unified, top: fields.next()?, mount_point: fields.next()? })
    }

    /// The group and all above it, as far as they are visible.
    fn levels(&self, root: &Path, group: &Path) -> Vec<Level> {
        // A group outside of what is mounted, as after a move between namespaces, is bound by what
        // is seen at the top.
        let below = group.strip_prefix(&self.top).unwrap_or(Path::new(""));
        let is_inside = below.components().all(|part| matches!(part, std::path::Component::Normal(_)));
        let below = if is_inside { below } else { Path::new("") };
        let top = root.join(self.mount_point.strip_prefix("/").unwrap_or(&self.mount_point));
        let folders = below.ancestors().map(|part| top.join(part));
        let level = |(height, folder)| Level { is_unified: self.is_unified, is_own: height == 0, folder };
        folders.enumerate().map(level).collect()
    }
}

/// Blanks and other special characters are written as three octal digits.
fn unescaped(field: &str) -> PathBuf {
    let mut bytes = Vec::with_capacity(field.len());
    let mut rest = field.as_bytes();
    while let Some((&byte, after)) = rest.split_first() {
        let code = after.get(..3).filter(|_| byte == b'\\').and_then(|digits| {
            digits
                .iter()
                .try_fold(0u32, |code, digit| matches!(digit, b'0'..=b'7').then(|| code * 8 + u32::from(digit - b'0')))
        });
        match code.and_then(|code| u8::try_from(code).ok()) {
            Some(code) => {
                bytes.push(code);
                rest = &after[3..];
            }
            None => {
                bytes.push(byte);
                rest = after;
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned().into()
}

/// One group's folder.
struct Level {
    is_unified: bool,
    /// Whether the process is in this group, not in one below it.
    is_own: bool,
    folder: PathBuf,
}

impl Level {
    fn room(&self) -> Option<u64> {
        let stat = fs::read_to_string(self.folder.join("memory.stat")).unwrap_or_default();
        let field = |name: &str| stat.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok());
        let (limits, used, unused): ([Option<u64>; 2], _, Option<u64>) = match self.is_unified {
            // Beyond `high` a process is slowed down almost to a stop.
            true => {
                let limits = [self.number("memory.max"), self.number("memory.high")];
                (limits, self.number("memory.current"), field("inactive_file"))
            }
            // Before groups were always part of those above, each said whether it was.
            false if !self.is_own && self.number("memory.use_hierarchy") == Some(0) => return None,
            false => {
                let limits = [self.number("memory.limit_in_bytes"), field("hierarchical_memory_limit")];
                (limits, self.number("memory.usage_in_bytes"), field("total_inactive_file"))
            }
        };
        // Idle file pages are freed when memory runs short.
        let used = used.unwrap_or(0).saturating_sub(unused.unwrap_or(0));
        limits.into_iter().flatten().min().map(|limit| limit.saturating_sub(used))
    }

    /// None also for `max`.
    fn number(&self, file: &str) -> Option<u64> {
        fs::read_to_string(self.folder.join(file)).ok()?.trim().parse().ok()
    }
}

#[cfg(test)]
mod tests;
