//! Order, refusals, answers, warnings, and the end of the thread.

use std::sync::mpsc::{self, Receiver};

use DiskTaskKind::{Fetch, Store};
use folio_scheduler::HostSlot;

use super::*;
use crate::tiers::tests::{Scratch, contents, fill, get, open, path_of, put, small_host, task, two};

type Warnings = Arc<Mutex<Vec<String>>>;

fn start(store: &DiskStore, host: &Arc<HostTier>) -> (DiskIo, Receiver<DiskDone>, Warnings) {
    let (sender, done) = mpsc::channel();
    let warnings = Warnings::default();
    let heard = Arc::clone(&warnings);
    let warn = move |text: &str| heard.lock().unwrap().push(text.to_owned());
    let io = DiskIo::start_with(store.clone(), Arc::clone(host), move |d| drop(sender.send(d)), warn).unwrap();
    (io, done, warnings)
}

fn ended(ticket: u64, ok: bool, lost: &[u128]) -> DiskDone {
    DiskDone { ticket, ok, lost: lost.to_vec() }
}

/// Submits a store whose first slot is locked, and returns when the thread has begun it.
fn hold_up(io: &DiskIo, store: &DiskStore, task: DiskTask) {
    let before = store.bytes();
    io.submit(task);
    while store.bytes() == before {
        std::thread::yield_now();
    }
}

#[test]
fn tasks_are_answered_and_fetches_go_first() {
    let scratch = Scratch::new("order");
    let (store, host) = (open(&scratch.0, 1 << 20), small_host());
    put(&store, &host, 1, 0).unwrap();
    fill(&host, &two(0), 2);
    fill(&host, &two(4), 3);
    let (io, done, warnings) = start(&store, &host);
    let held = host.slot(0, HostSlot(0));
    hold_up(&io, &store, task(10, Store, 2, 0));
    io.submit(task(11, Store, 3, 4));
    io.submit(task(12, Fetch, 1, 6));
    drop(held);
    assert_eq!(done.recv().unwrap(), ended(10, true, &[]));
    assert_eq!(done.recv().unwrap(), ended(12, true, &[]));
    assert_eq!(done.recv().unwrap(), ended(11, true, &[]));
    fill(&host, &two(2), 1);
    assert!(contents(&host, &two(6)) == contents(&host, &two(2)));
    io.submit(task(13, Fetch, 9, 6));
    assert_eq!(done.recv().unwrap(), ended(13, false, &[9]));
    assert!(warnings.lock().unwrap().is_empty(), "a file that is gone is nothing to warn of");
}

#[test]
fn a_full_queue_refuses_at_once_and_the_end_stores_what_waits() {
    let scratch = Scratch::new("full");
    let (store, host) = (open(&scratch.0, 1 << 20), small_host());
    fill(&host, &two(0), 1);
    let (io, done, _) = start(&store, &host);
    let held = host.slot(0, HostSlot(0));
    hold_up(&io, &store, task(0, Store, 1, 0));
    for ticket in 1..=MOST_WAITING as u64 {
        io.submit(task(ticket, Store, 100 + u128::from(ticket), 2));
    }
    assert!(done.try_recv().is_err(), "all of them wait");
    io.submit(task(9000, Store, 7, 2));
    assert_eq!(done.try_recv().unwrap(), ended(9000, false, &[]), "answered on this thread");
    io.submit(task(9001, Fetch, 7, 2));
    assert!(done.try_recv().is_err(), "fetches have a queue of their own");
    let shared = Arc::clone(&io.shared);
    let closing = std::thread::spawn(move || drop(io));
    while shared.queue().ends_by.is_none() {
        std::thread::yield_now();
    }
    drop(held);
    closing.join().unwrap();
    drop(shared);
    let tickets: Vec<u64> = done.iter().map(|done| done.ticket).collect();
    assert_eq!(tickets, (0..=MOST_WAITING as u64).collect::<Vec<_>>(), "stores are finished, the fetch is forgotten");
    get(&store, &host, 1, 0).unwrap();
}

#[test]
fn a_damaged_file_is_warned_of_once_and_lost() {
    let scratch = Scratch::new("warn");
    let (store, host) = (open(&scratch.0, 1 << 20), small_host());
    let (io, done, warnings) = start(&store, &host);
    for round in 0..3 {
        put(&store, &host, 1, 0).unwrap();
        let path = path_of(&scratch.0, 1);
        let mut bytes = std::fs::read(&path).unwrap();
        bytes[200] ^= 4;
        std::fs::write(&path, bytes).unwrap();
        io.submit(task(round, Fetch, 1, 2));
        assert_eq!(done.recv().unwrap(), ended(round, false, &[1]));
        assert!(!path.exists());
    }
    let warnings = warnings.lock().unwrap();
    assert_eq!(warnings.len(), 1, "{warnings:?}");
    assert!(warnings[0].contains("damaged"), "{warnings:?}");
}

#[test]
fn evictions_are_told_and_a_pause_in_storing_is_warned_of_once() {
    let scratch = Scratch::new("full-disk");
    let host = small_host();
    let size = {
        let store = open(&scratch.0, 1 << 20);
        put(&store, &host, 1, 0).unwrap();
        store.bytes()
    };
    let store = open(&scratch.0, size);
    let (io, done, warnings) = start(&store, &host);
    fill(&host, &two(0), 2);
    io.submit(task(1, Store, 2, 0));
    assert_eq!(done.recv().unwrap(), ended(1, true, &[1]));
    let blocked = 0xcd << 120;
    std::fs::write(path_of(&scratch.0, blocked).parent().unwrap(), b"").unwrap();
    io.submit(task(2, Store, blocked, 0));
    io.submit(task(3, Store, blocked, 0));
    io.submit(task(4, Store, 3, 0));
    assert_eq!(done.recv().unwrap(), ended(2, false, &[2]), "it went to make room for one that could not be written");
    assert_eq!(done.recv().unwrap(), ended(3, false, &[]));
    assert_eq!(done.recv().unwrap(), ended(4, false, &[]));
    let warnings = warnings.lock().unwrap();
    assert_eq!(warnings.len(), 1, "{warnings:?}");
    assert!(warnings[0].contains("pauses storing until a later try succeeds"), "{warnings:?}");
}

/// A task that contradicts the host tier is a bug: it is answered as failed, and the thread
/// continues.
#[test]
fn a_panic_is_an_answer() {
    let scratch = Scratch::new("panic");
    let (store, host) = (open(&scratch.0, 1 << 20), small_host());
    let (io, done, _) = start(&store, &host);
    io.submit(DiskTask { slots: Vec::new(), ..task(1, Fetch, 1, 0) });
    assert_eq!(done.recv().unwrap(), ended(1, false, &[1]));
    fill(&host, &two(0), 1);
    io.submit(task(2, Store, 1, 0));
    assert_eq!(done.recv().unwrap(), ended(2, true, &[]));
}

#[test]
fn a_warning_that_cannot_be_given_is_no_reason_to_leave_a_task_unanswered() {
    let scratch = Scratch::new("unheard");
    let (store, host) = (open(&scratch.0, 1 << 20), small_host());
    put(&store, &host, 1, 0).unwrap();
    put(&store, &host, 2, 0).unwrap();
    let file = std::fs::File::options().write(true).open(path_of(&scratch.0, 1)).unwrap();
    file.set_len(20).unwrap();
    let (sender, done) = mpsc::channel();
    let warn = |text: &str| panic!("planted panic: {text}");
    let io = DiskIo::start_with(store, Arc::clone(&host), move |d| drop(sender.send(d)), warn).unwrap();
    io.submit(task(1, Fetch, 1, 2));
    io.submit(task(2, Fetch, 2, 4));
    assert_eq!(done.recv().unwrap(), ended(1, false, &[1]));
    assert_eq!(done.recv().unwrap(), ended(2, true, &[]));
}
