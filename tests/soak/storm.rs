//! Thousands of clients that connect, ask, and disconnect.

use std::time::{Duration, Instant};

use folio_testing::Rng;

use crate::alone;
use crate::http::Connection;
use crate::load::Baseline;
use crate::record::{Outcome, exchange};
use crate::server::Server;
use crate::table::bases;

const NUM_CONNECTIONS: u64 = 2000;
const NUM_THREADS: u64 = 16;

#[test]
fn nothing_is_left_of_a_storm_of_cancelled_requests() {
    let _alone = alone();
    let mut server = Server::start(&["--max-model-len", "512", "--kv-cache-mib", "16"]);
    let asks = bases();
    let mut connection = Connection::open(server.port).expect("the server listens");
    let Outcome::Answer(before) = exchange(&mut connection, &asks[3]) else { panic!("an idle server answers") };
    drop(connection);
    let baseline = Baseline::now(&server);
    let start = Instant::now();
    std::thread::scope(|scope| {
        for thread in 0..NUM_THREADS {
            let (mut rng, asks, port) = (Rng::stream(9, thread), &asks, server.port);
            scope.spawn(move || {
                for _ in 0..NUM_CONNECTIONS / NUM_THREADS {
                    let mut connection = Connection::open(port).expect("the server listens");
                    let (head, body) = rng.pick(asks).streamed().bytes();
                    // Half of them send a complete request.
                    let bytes = [head, body].concat();
                    let sent = if rng.below(2) == 0 { bytes.len() } else { rng.below(bytes.len()) };
                    connection.send(&bytes[..sent]).expect("the server reads");
                    std::thread::sleep(Duration::from_millis(rng.below(10) as u64));
                }
            });
        }
    });
    let took = start.elapsed();
    assert!(server.ended().is_none(), "the server has ended: {:#?}", server.log());
    let idle = baseline.wait_for(&server);
    eprintln!(
        "storm: {NUM_CONNECTIONS} came and went in {:.1} s; all forgotten {:.2} s later",
        took.as_secs_f64(),
        idle.as_secs_f64()
    );
    let mut connection = Connection::open(server.port).expect("the server listens");
    let Outcome::Answer(after) = exchange(&mut connection, &asks[3]) else { panic!("the server still answers") };
    assert_eq!(after, before);
}
