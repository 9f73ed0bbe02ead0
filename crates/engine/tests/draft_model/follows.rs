//! A draft model that is the target itself is always right, whatever happened to a request before:
//! a single wrong key or value shows.

use folio_device::reference::Reference;
use folio_engine::speculate::DraftModelOptions;
use folio_model::OpenModel;

use crate::{
    driver::{Count, Driver, Request},
    tiny,
};

/// Every draft has its full length.
pub const SURE: DraftModelOptions = DraftModelOptions {
    most_tokens: 5,
    most_rows: 48,
    keeps_above: 0.0,
    goes_on_above: 0.0,
    shared_tokens: usize::MAX,
    stretch: 1.0,
};

/// Two layer groups. The second has no window.
fn twins(options: DraftModelOptions) -> Driver<Reference> {
    let model = tiny::alternating();
    Driver::new([Reference::new(); 2], [&model, &model], 60, options).expect("twins")
}

pub fn prompt(seed: u32, len: usize) -> Vec<u32> {
    (0..len as u32).map(|i| (i.wrapping_mul(2_654_435_761).wrapping_add(seed * 977) >> 7) % 211).collect()
}

/// All drafted tokens were accepted, and every draft but `without` had its full length.
fn assert_sure(count: Count, without: usize) {
    assert_eq!(count.accepted, count.drafted, "{count:?}");
    assert!(count.drafted >= (count.asked - without) * 4, "{count:?} with {without} left out");
}

#[test]
fn it_is_never_wrong_about_itself() {
    let mut driver = twins(SURE);
    let (mut a, mut b, mut c) =
        (Request::new(&prompt(1, 20), 5), Request::new(&prompt(2, 3), 3), Request::new(&prompt(3, 17), 4));
    for step in 0..12 {
        match step % 3 {
            0 => driver.step(&mut [&mut a, &mut b, &mut c]),
            1 => driver.step(&mut [&mut c, &mut a]),
            _ => driver.step(&mut [&mut b]),
        }
    }
    assert_eq!(driver.count.accepted, driver.count.drafted, "{:?}", driver.count);
    // A full draft for every step but the first of each request.
    assert_eq!(a.tokens.len(), 20 + 8 + 7 * 5);
    assert_eq!(b.tokens.len(), 3 + 8 + 7 * 3);
    assert_eq!(c.tokens.len(), 17 + 8 + 7 * 4);
}

/// Drafts over several blocks after the request's own, as long `--speculate-tokens` gives: scratch
/// blocks follow each other.
#[test]
fn a_long_draft_has_room_behind_the_table() {
    for most in [16, 17, 33, 63] {
        let mut driver = twins(DraftModelOptions { most_tokens: most, most_rows: 256, ..SURE });
        // One ends with a block, so that its whole draft is in scratch blocks.
        let (mut a, mut b) = (Request::new(&prompt(12, 32), most), Request::new(&prompt(13, 20), most));
        (0..4).for_each(|_| driver.step(&mut [&mut a, &mut b]));
        assert_eq!(driver.count.accepted, driver.count.drafted, "{most}: {:?}", driver.count);
        assert_eq!((a.tokens.len(), b.tokens.len()), (32 + 4 + 3 * most, 20 + 4 + 3 * most), "{most} at once");
    }
}

#[test]
fn it_catches_up_behind_a_gap() {
    let mut driver = twins(SURE);
    let mut request = Request::new(&prompt(4, 150), 0);
    (0..6).for_each(|_| driver.step(&mut [&mut request]));
    assert_eq!(driver.count.drafted, 0);
    request.most = 5;
    // 153 tokens at 48 rows a pass: three steps of one token without a draft, and a fourth with
    // one.
    (0..4).for_each(|_| driver.step(&mut [&mut request]));
    assert_eq!(driver.count.drafted, 0, "{:?}", driver.count);
    (0..5).for_each(|_| driver.step(&mut [&mut request]));
    assert_sure(driver.count, 4);
    request.most = 0;
    (0..5).for_each(|_| driver.step(&mut [&mut request]));
    request.most = 5;
    (0..5).for_each(|_| driver.step(&mut [&mut request]));
    assert_sure(driver.count, 5);
}

#[test]
fn it_follows_a_request_that_gave_way() {
    let mut driver = twins(SURE);
    let (mut a, mut b) = (Request::new(&prompt(5, 40), 5), Request::new(&prompt(6, 33), 5));
    for _ in 0..3 {
        (0..4).for_each(|_| driver.step(&mut [&mut a, &mut b]));
        driver.preempt(&mut a);
        // The other request takes some of its blocks.
        (0..4).for_each(|_| driver.step(&mut [&mut b]));
        // Its own are returned in another order.
        driver.free.reverse();
        (0..3).for_each(|_| driver.step(&mut [&mut a]));
    }
    assert_sure(driver.count, 3 * 5);
}

#[test]
fn it_knows_what_a_cached_prefix_holds() {
    let mut driver = twins(SURE);
    let text = prompt(7, 80);
    for drafts_before in [true, false] {
        let mut first = Request::new(&text, if drafts_before { 5 } else { 0 });
        (0..4).for_each(|_| driver.step(&mut [&mut first]));
        // Two requests at once that share blocks, perhaps before the draft model has written them.
        let longer = [&text[..], &prompt(8, 9)].concat();
        let mut second = Request::with_prefix_of(&first, &longer, 5);
        let mut third = Request::with_prefix_of(&first, &text, 5);
        assert_eq!((second.computed, third.computed), (80, 64));
        (0..6).for_each(|_| driver.step(&mut [&mut second, &mut third]));
        if drafts_before {
            assert_sure(driver.count, 4 + 2);
        }
    }
    assert_sure(driver.count, 6 + 6);
}

#[test]
fn the_end_of_the_context_ends_the_draft() {
    let mut driver = twins(SURE);
    let mut request = Request::new(&prompt(9, 490), 5);
    driver.chunk = 200;
    while request.tokens.len() < 512 {
        request.most = 5.min(511 - request.tokens.len());
        driver.step(&mut [&mut request]);
    }
    assert_eq!(driver.count.accepted, driver.count.drafted);
}

#[test]
fn tokens_that_only_one_knows_cost_no_more_than_agreement() {
    let mut driver = twins(DraftModelOptions { shared_tokens: 150, ..SURE });
    let mut request = Request::new(&prompt(10, 40), 5);
    (0..20).for_each(|_| driver.step(&mut [&mut request]));
    assert!(request.tokens.iter().any(|&token| token >= 150), "the test has tokens beyond");
    assert!(driver.count.drafted > 0);
}

#[test]
fn doubt_ends_a_draft() {
    let mut driver = twins(DraftModelOptions { goes_on_above: 1.1, ..SURE });
    let mut request = Request::new(&prompt(11, 20), 5);
    (0..6).for_each(|_| driver.step(&mut [&mut request]));
    assert_eq!((driver.count.drafted, driver.count.accepted), (5, 5), "one token a draft");
    let mut driver = twins(DraftModelOptions { keeps_above: 1.1, ..SURE });
    let mut request = Request::new(&prompt(11, 20), 5);
    (0..3).for_each(|_| driver.step(&mut [&mut request]));
    assert_eq!(driver.count.drafted, 0);
}

#[test]
fn a_target_without_a_full_group_is_refused() {
    let mut windowed = tiny::alternating();
    windowed.spec.layers.iter_mut().for_each(|layer| layer.attention.window = Some(24));
    let refused = Driver::new([Reference::new(); 2], [&windowed, &tiny::alternating()], 10, SURE).err();
    let message = refused.expect("refused").to_string();
    assert!(message.contains("has a sliding window"), "{message}");
    // The other way round is accepted.
    let model: OpenModel = tiny::alternating();
    Driver::new([Reference::new(); 2], [&model, &windowed], 10, SURE).expect("a draft model of windows alone");
}
