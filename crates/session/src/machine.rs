//! Memory and cores of this machine.

mod cgroups;

use std::path::Path;

/// Memory that could be taken now without swapping, in bytes; none where the system does not say.
/// The limits of this process's control groups count too.
pub fn memory_available() -> Option<u64> {
    let free = meminfo("MemAvailable:", &std::fs::read_to_string("/proc/meminfo").ok()?)?;
    Some(cgroups::room(Path::new("/")).map_or(free, |room| room.min(free)))
}

/// The most memory this process has ever held at once, mapped file pages included, in bytes.
pub fn peak_resident() -> Option<u64> {
    meminfo("VmHWM:", &std::fs::read_to_string("/proc/self/status").ok()?)
}

fn meminfo(field: &str, text: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(field))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// Cores this process may use.
pub fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, |cores| cores.get())
}

#[cfg(test)]
mod tests {
    #[test]
    fn meminfo_lines() {
        let text = "MemTotal:       24689876 kB\nMemAvailable:   23000000 kB\n";
        assert_eq!(super::meminfo("MemAvailable:", text), Some(23_000_000 * 1024));
        assert_eq!(super::meminfo("SwapTotal:", text), None);
    }
}
