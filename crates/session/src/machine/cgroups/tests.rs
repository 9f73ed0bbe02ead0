//! Layouts of control groups as machines, containers and batch systems have them.

use super::*;

const MIB: u64 = 1 << 20;
const UNIFIED: &str = "29 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate";
const OLD: &str = "36 25 0:30 / /sys/fs/cgroup/memory rw,nosuid shared:9 - cgroup cgroup rw,memory";

/// A folder that stands for `/`, gone with this.
struct Tree(PathBuf);

impl Drop for Tree {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Files by path, contents in MiB where they are numbers of a limit; what is left, in MiB.
fn check(name: &str, groups: &str, mounts: &[&str], files: &[(&str, &str)], expected: Option<u64>) {
    let folder = std::env::temp_dir().join(format!("folio-groups-{}-{}", std::process::id(), name.replace(' ', "-")));
    let tree = Tree(folder);
    let write = |path: &str, text: String| {
        let path = tree.0.join(path);
        fs::create_dir_all(path.parent().expect("a folder")).expect("it can be made");
        fs::write(path, text).expect("it can be written");
    };
    write("proc/self/cgroup", groups.into());
    write("proc/self/mountinfo", mounts.join("\n") + "\n");
    for (path, text) in files {
        // A number alone, or one behind a name.
        let in_bytes = |word: &str| word.parse::<u64>().map_or(word.to_owned(), |mib| (mib * MIB).to_string());
        let is_flag = path.ends_with("use_hierarchy");
        let words = text.split(' ').map(|word| if is_flag { word.to_owned() } else { in_bytes(word) });
        write(path, words.collect::<Vec<_>>().join(" ") + "\n");
    }
    assert_eq!(room(&tree.0), expected.map(|mib| mib * MIB), "{name}");
}

#[test]
fn the_unified_hierarchy() {
    let at = |path: &str| format!("0::{path}\n");
    let check = |name, group: &str, files: &[(&str, &str)], expected| {
        check(name, &at(group), &[UNIFIED, "1 2 0:3 / / rw - ext4 /dev/sda rw"], files, expected);
    };
    check("no limit", "/a", &[("sys/fs/cgroup/a/memory.max", "max"), ("sys/fs/cgroup/a/memory.current", "9")], None);
    check("no files", "/a/b", &[], None);
    let own = [("sys/fs/cgroup/memory.max", "1024"), ("sys/fs/cgroup/memory.current", "200")];
    check("a container of its own", "/", &own, Some(824));
    let nested = [
        ("sys/fs/cgroup/system.slice/memory.max", "max"),
        ("sys/fs/cgroup/system.slice/folio.service/memory.max", "1024"),
        ("sys/fs/cgroup/system.slice/folio.service/memory.current", "300"),
        ("sys/fs/cgroup/system.slice/folio.service/memory.stat", "inactive_file 100"),
    ];
    check("a service", "/system.slice/folio.service", &nested, Some(824));
    let tight_parent = [
        ("sys/fs/cgroup/a/memory.max", "500"),
        ("sys/fs/cgroup/a/memory.current", "450"),
        ("sys/fs/cgroup/a/b/memory.max", "1024"),
        ("sys/fs/cgroup/a/b/memory.current", "10"),
    ];
    check("a parent with less left", "/a/b", &tight_parent, Some(50));
    let high = [
        ("sys/fs/cgroup/a/memory.max", "1024"),
        ("sys/fs/cgroup/a/memory.high", "512"),
        ("sys/fs/cgroup/a/memory.current", "12"),
    ];
    check("high below max", "/a", &high, Some(500));
    let full = [("sys/fs/cgroup/a/memory.max", "10"), ("sys/fs/cgroup/a/memory.current", "12")];
    check("nothing left", "/a", &full, Some(0));
    let slurm = [
        ("sys/fs/cgroup/system.slice/slurmstepd.scope/job_7/memory.max", "2048"),
        ("sys/fs/cgroup/system.slice/slurmstepd.scope/job_7/memory.current", "48"),
        ("sys/fs/cgroup/system.slice/slurmstepd.scope/job_7/step_0/user/task_0/memory.max", "max"),
        ("sys/fs/cgroup/system.slice/slurmstepd.scope/job_7/step_0/user/task_0/memory.current", "40"),
    ];
    check("a job of a batch system", "/system.slice/slurmstepd.scope/job_7/step_0/user/task_0", &slurm, Some(2000));
    let top = [("sys/fs/cgroup/memory.max", "100"), ("sys/fs/cgroup/memory.current", "1")];
    check("outside of the namespace", "/../other", &top, Some(99));
}

#[test]
fn the_old_hierarchy() {
    let groups = |path: &str| format!("12:cpu,cpuacct:/x\n4:memory:{path}\n1:name=systemd:/y\n");
    let check = |name, group: &str, mounts: &[&str], files: &[(&str, &str)], expected| {
        check(name, &groups(group), mounts, files, expected)
    };
    let unlimited = [
        ("sys/fs/cgroup/memory/memory.limit_in_bytes", "8796093022207"),
        ("sys/fs/cgroup/memory/memory.usage_in_bytes", "207"),
    ];
    check("as good as no limit", "/", &[OLD], &unlimited, Some(8_796_093_022_000));
    let container = [
        ("sys/fs/cgroup/memory/memory.limit_in_bytes", "1024"),
        ("sys/fs/cgroup/memory/memory.usage_in_bytes", "300"),
        ("sys/fs/cgroup/memory/memory.stat", "total_inactive_file 100"),
    ];
    let bound = "36 25 0:30 /docker/0123 /sys/fs/cgroup/memory ro,nosuid master:9 - cgroup cgroup rw,memory";
    check("a container under the host's names", "/docker/0123", &[bound], &container, Some(824));
    let below = [
        ("sys/fs/cgroup/memory/docker/0123/memory.limit_in_bytes", "1024"),
        ("sys/fs/cgroup/memory/docker/0123/memory.usage_in_bytes", "24"),
        ("sys/fs/cgroup/memory/docker/memory.limit_in_bytes", "2048"),
        ("sys/fs/cgroup/memory/docker/memory.usage_in_bytes", "1548"),
    ];
    check("a parent with less left, old", "/docker/0123", &[OLD], &below, Some(500));
    let apart = [&below[..], &[("sys/fs/cgroup/memory/docker/memory.use_hierarchy", "0")]].concat();
    check("a parent that does not count", "/docker/0123", &[OLD], &apart, Some(1000));
    let unseen = [
        ("sys/fs/cgroup/memory/memory.limit_in_bytes", "4096"),
        ("sys/fs/cgroup/memory/memory.usage_in_bytes", "24"),
        ("sys/fs/cgroup/memory/memory.stat", "hierarchical_memory_limit 1024"),
    ];
    check("a limit above what is seen", "/docker/0123", &[bound], &unseen, Some(1000));
    let other = "37 25 0:31 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct";
    check("another controller's mount", "/", &[other], &container, None);
    let blanks = r"36 25 0:30 / /sys/fs/my\040groups\134/memory rw - cgroup cgroup rw,memory";
    let there = [
        (r"sys/fs/my groups\/memory/a/memory.limit_in_bytes", "100"),
        (r"sys/fs/my groups\/memory/a/memory.usage_in_bytes", "1"),
    ];
    check("a mount point with blanks", "/a", &[blanks], &there, Some(99));
}

#[test]
fn both_hierarchies() {
    let hybrid = [
        "30 25 0:27 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw,nsdelegate",
        "31 25 0:28 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,xattr,name=systemd",
        OLD,
    ];
    let groups = "4:memory:/user.slice\n1:name=systemd:/user.slice/session\n0::/user.slice/session\n";
    let files = [
        ("sys/fs/cgroup/memory/user.slice/memory.limit_in_bytes", "700"),
        ("sys/fs/cgroup/memory/user.slice/memory.usage_in_bytes", "100"),
    ];
    check("the old one has memory", groups, &hybrid, &files, Some(600));
    let both = [&files[..], &[("sys/fs/cgroup/unified/user.slice/memory.max", "400")]].concat();
    check("the least of both", groups, &hybrid, &both, Some(400));
    check("tables of nonsense", "x\n:\n0::\n4:memory\n", &["", " - ", "a - cgroup2", "1 2 3 - cgroup2 x y"], &[], None);
}
