//! Memory nodes: the CPUs near each memory, and the threads of a pool that are pinned to them.
//!
//! Only on Linux, and only with several nodes; elsewhere there are none, and no thread is pinned. A
//! thread may run on all CPUs of its node, so that the system can still balance. Nodes only affect
//! speed: if the system gives no information or refuses a request, nothing fails.

use std::fs::read_to_string;
use std::ops::Range;
use std::path::Path;

/// The most CPUs that the kernel can be built for.
const MOST_CPUS: usize = 8192;

/// One of at least two memory nodes.
pub struct Node {
    /// The threads of the pool that belong to it, at least one. Nodes follow one another without a
    /// gap.
    pub threads: Range<usize>,
    cpus: Vec<usize>,
}

/// The nodes for a pool of `num_threads` threads; none unless there are at least two.
pub fn nodes(num_threads: usize) -> Vec<Node> {
    if num_threads < 2 {
        return Vec::new();
    }
    let lists = cpus_of_nodes(Path::new("/sys/devices/system/node"), &system::allowed());
    deal(lists.unwrap_or_default(), num_threads)
}

/// Divides threads among nodes with these CPUs, in proportion. No nodes if there are more threads
/// than CPUs, because the system should move threads that share a CPU, or if one node would have
/// all threads.
fn deal(cpus_of_nodes: Vec<Vec<usize>>, num_threads: usize) -> Vec<Node> {
    let num_cpus: usize = cpus_of_nodes.iter().map(Vec::len).sum();
    if !(2..=num_cpus).contains(&num_threads) {
        return Vec::new();
    }
    // Rounded. As there are at most as many threads as CPUs, the same holds for each node.
    let threads_before = |cpu: usize| (2 * num_threads * cpu + num_cpus) / (2 * num_cpus);
    let mut next_cpu = 0;
    let node = |cpus: Vec<usize>| {
        let first_cpu = next_cpu;
        next_cpu += cpus.len();
        Node { threads: threads_before(first_cpu)..threads_before(next_cpu), cpus }
    };
    let mut nodes: Vec<Node> = cpus_of_nodes.into_iter().map(node).collect();
    nodes.retain(|node| !node.threads.is_empty());
    if nodes.len() < 2 { Vec::new() } else { nodes }
}

/// The allowed CPUs of each node, from a folder like `/sys/devices/system/node`. None if it cannot
/// be read or fewer than two nodes have such CPUs.
fn cpus_of_nodes(folder: &Path, allowed: &[usize]) -> Option<Vec<Vec<usize>>> {
    let list = |name: &str| parse_list(&read_to_string(folder.join(name)).ok()?);
    let nodes = list("has_cpu")?;
    if nodes.len() < 2 {
        return None;
    }
    let cpus = |node: usize| list(&format!("node{node}/cpulist"));
    let mut lists = nodes.into_iter().map(cpus).collect::<Option<Vec<_>>>()?;
    for cpus in &mut lists {
        cpus.retain(|cpu| allowed.contains(cpu));
    }
    lists.retain(|cpus| !cpus.is_empty());
    (lists.len() >= 2).then_some(lists)
}

/// Numbers in the kernel's list format, such as `0-3,8,10-11`.
fn parse_list(text: &str) -> Option<Vec<usize>> {
    let mut numbers = Vec::new();
    let text = text.trim();
    if text.is_empty() {
        return Some(numbers);
    }
    for piece in text.split(',') {
        let (first, last) = piece.split_once('-').unwrap_or((piece, piece));
        let (first, last) = (first.parse::<usize>().ok()?, last.parse::<usize>().ok()?);
        if first > last || last >= MOST_CPUS {
            return None;
        }
        numbers.extend(first..=last);
    }
    Some(numbers)
}

impl Node {
    /// Pins the calling thread to the node.
    pub fn hold(&self) {
        system::allow(&self.cpus);
    }

    /// Moves the calling thread to the node, if it may run there, but does not pin it: for a thread
    /// that is not the pool's, since its child threads would inherit the pin. Costs next to nothing
    /// if the thread is there already.
    pub fn fetch(&self) {
        if system::current().is_none_or(|cpu| self.cpus.contains(&cpu)) {
            return;
        }
        let allowed = system::allowed();
        let here: Vec<usize> = self.cpus.iter().copied().filter(|cpu| allowed.contains(cpu)).collect();
        if !here.is_empty() && system::allow(&here) {
            system::allow(&allowed);
        }
    }
}

/// The CPUs that the calling thread may run on, and the one it runs on.
#[cfg(target_os = "linux")]
mod system {
    use std::ffi::c_ulong;

    use super::MOST_CPUS;

    const WORD_BITS: usize = c_ulong::BITS as usize;
    /// One bit per CPU. The C library's own type ends at 1024 of them; the kernel may have more.
    const NO_CPUS: [c_ulong; MOST_CPUS / WORD_BITS] = [0; MOST_CPUS / WORD_BITS];

    /// CPUs that this thread may run on; empty if the system refuses.
    pub fn allowed() -> Vec<usize> {
        let mut mask = NO_CPUS;
        // SAFETY: the kernel writes at most the size of the mask; any bits are a value of it.
        let failed = unsafe { libc::sched_getaffinity(0, size_of_val(&mask), mask.as_mut_ptr().cast()) } < 0;
        let has = |cpu: &usize| mask[cpu / WORD_BITS] >> (cpu % WORD_BITS) & 1 == 1;
        if failed { Vec::new() } else { (0..MOST_CPUS).filter(has).collect() }
    }

    /// Restricts this thread to these CPUs; returns whether the system accepted.
    pub fn allow(cpus: &[usize]) -> bool {
        let mut mask = NO_CPUS;
        for &cpu in cpus {
            mask[cpu / WORD_BITS] |= 1 << (cpu % WORD_BITS);
        }
        // SAFETY: the kernel reads at most the size of the mask, and writes nothing.
        unsafe { libc::sched_setaffinity(0, size_of_val(&mask), mask.as_ptr().cast()) == 0 }
    }

    pub fn current() -> Option<usize> {
        // SAFETY: takes no argument and touches no memory of ours.
        usize::try_from(unsafe { libc::sched_getcpu() }).ok()
    }
}

#[cfg(not(target_os = "linux"))]
mod system {
    pub fn allowed() -> Vec<usize> {
        Vec::new()
    }

    pub fn allow(_: &[usize]) -> bool {
        false
    }

    pub fn current() -> Option<usize> {
        None
    }
}

/// For tests on machines with only one node.
#[cfg(test)]
pub mod testing {
    use super::{Node, deal, system};

    /// The machine's CPUs, treated as those of two nodes, the first with twice as many threads.
    pub fn two_nodes(num_threads: usize) -> Vec<Node> {
        let mut allowed = system::allowed();
        if allowed.is_empty() {
            allowed.push(0);
        }
        let half = allowed.len() / 2;
        // CPUs are repeated, so that there are enough for any number of threads.
        let cpus = |some: &[usize], count: usize| some.iter().copied().cycle().take(count).collect::<Vec<usize>>();
        let (more, fewer) = (cpus(&allowed[half..], 2 * num_threads), cpus(&allowed[..half.max(1)], num_threads));
        deal(vec![more, fewer], num_threads)
    }

    /// Whether the calling thread is pinned to the node; none if the system refuses.
    pub fn is_held(node: &Node) -> Option<bool> {
        let allowed = system::allowed();
        let can_be_held = !allowed.is_empty() && system::allow(&allowed);
        can_be_held.then(|| allowed.iter().all(|cpu| node.cpus.contains(cpu)))
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::PathBuf;

    use super::*;

    #[test]
    fn lists_of_numbers() {
        let check = |text: &str, expected: Option<&[usize]>| {
            assert_eq!(parse_list(text).as_deref(), expected, "{text:?}");
        };
        check("0-3,8,10-11\n", Some(&[0, 1, 2, 3, 8, 10, 11]));
        check("5", Some(&[5]));
        check("8191\n", Some(&[8191]));
        check("\n", Some(&[]));
        for odd in ["3-1", "a", "1,,2", "0-", "-3", "1-2-3", "0x1", "0-8192", "0-31:2/4", "99999999999999999999"] {
            check(odd, None);
        }
    }

    /// A folder like `/sys/devices/system/node`, removed with the value.
    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str, has_cpu: &str, cpulists: &[(usize, &str)]) -> Self {
            let path = std::env::temp_dir().join(format!("folio-nodes-{name}-{}", std::process::id()));
            fs::create_dir_all(&path).unwrap();
            fs::write(path.join("has_cpu"), has_cpu).unwrap();
            for (node, list) in cpulists {
                let node = path.join(format!("node{node}"));
                fs::create_dir_all(&node).unwrap();
                fs::write(node.join("cpulist"), list).unwrap();
            }
            Self(path)
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn nodes_as_the_system_lists_them() {
        let all: Vec<usize> = (0..16).collect();
        let (first, second) = (vec![0, 1, 2, 3, 8, 9], vec![4, 5]);
        let two = [(0, "0-3,8-9\n"), (1, "4-5\n")];

        let folder = Folder::new("two", "0-1\n", &two);
        assert_eq!(cpus_of_nodes(&folder.0, &all), Some(vec![first.clone(), second.clone()]));
        // Only allowed CPUs count, and nodes that have any.
        assert_eq!(cpus_of_nodes(&folder.0, &[1, 5, 9]), Some(vec![vec![1, 9], vec![5]]));
        assert_eq!(cpus_of_nodes(&folder.0, &[0, 1, 2, 3]), None);
        assert_eq!(cpus_of_nodes(&folder.0, &[]), None);

        // Memory without CPUs makes no node, with or without the file that lists nodes with CPUs.
        for (name, has_cpu) in [("memory", "0,2\n"), ("memory-said", "0-2\n")] {
            let folder = Folder::new(name, has_cpu, &[(0, "0-3,8-9\n"), (1, "\n"), (2, "4-5\n")]);
            assert_eq!(cpus_of_nodes(&folder.0, &all), Some(vec![first.clone(), second.clone()]));
        }

        let one = Folder::new("one", "0\n", &two);
        let missing = Folder::new("missing", "0-2\n", &two);
        let nonsense = Folder::new("nonsense", "0-1\n", &[(0, "0-3\n"), (1, "four\n")]);
        for folder in [one.0.clone(), missing.0.clone(), nonsense.0.clone(), folder.0.join("nowhere")] {
            assert_eq!(cpus_of_nodes(&folder, &all), None, "{folder:?}");
        }
    }

    #[test]
    fn threads_are_dealt_out_in_proportion() {
        let check = |num_cpus: &[usize], num_threads: usize, expected: &[usize]| {
            let nodes = deal(num_cpus.iter().map(|&cpus| (0..cpus).collect()).collect(), num_threads);
            let threads: Vec<usize> = nodes.iter().map(|node| node.threads.len()).collect();
            assert_eq!(threads, expected, "{num_threads} threads on {num_cpus:?} cpus");
        };
        check(&[8, 8], 16, &[8, 8]);
        check(&[28, 28], 56, &[28, 28]);
        check(&[8, 8], 2, &[1, 1]);
        check(&[8, 4], 6, &[4, 2]);
        check(&[8, 4], 12, &[8, 4]);
        check(&[12, 6], 18, &[12, 6]);
        // Nodes that get no thread are left out, and a node that has all threads counts as none.
        check(&[4, 4, 4, 4], 2, &[1, 1]);
        check(&[8, 1], 2, &[]);
        check(&[8, 8], 1, &[]);
        check(&[8, 8], 17, &[]);
        check(&[], 4, &[]);
        check(&[], 0, &[]);
    }

    #[test]
    fn every_thread_has_one_node_and_no_node_more_threads_than_cpus() {
        for num_cpus in [vec![1usize, 1], vec![5, 3], vec![1, 7, 2], vec![3, 3, 3, 3], vec![24, 2, 9]] {
            let total: usize = num_cpus.iter().sum();
            for num_threads in 2..=total {
                let nodes = deal(num_cpus.iter().map(|&cpus| (0..cpus).collect()).collect(), num_threads);
                let threads: Vec<usize> = nodes.iter().flat_map(|node| node.threads.clone()).collect();
                assert!(nodes.is_empty() || threads == (0..num_threads).collect::<Vec<_>>(), "{threads:?}");
                assert!(nodes.iter().all(|node| node.threads.len() <= node.cpus.len()));
            }
        }
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_thread_is_held_for_good_but_fetched_for_now() {
        let allowed = system::allowed();
        let (first, last) = (allowed[0], allowed[allowed.len() - 1]);
        std::thread::spawn(move || {
            for cpu in [first, last] {
                let node = Node { threads: 0..1, cpus: vec![cpu] };
                node.fetch();
                assert_eq!(system::allowed(), allowed);
            }
            // The system may refuse this, which is fine.
            if system::allow(&[first]) {
                Node { threads: 0..1, cpus: vec![last] }.hold();
                assert_eq!(system::allowed(), [last]);
                // It does not move to a CPU where it must not run.
                Node { threads: 0..1, cpus: vec![first] }.fetch();
                assert_eq!(system::allowed(), [last]);
            }
        })
        .join()
        .unwrap();
    }
}
