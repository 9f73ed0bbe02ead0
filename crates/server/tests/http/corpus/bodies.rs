//! Bodies that are no JSON, no object, or not what they should be; and what their header says of
//! them.

use folio_testing::Rng;

use super::{Case, Ending, Expect, MARKER, Route, head, head_with_length};

pub fn add(route: &'static Route, cases: &mut Vec<Case>) {
    nonsense(route, cases);
    keys(route, cases);
    sizes(route, cases);
    kinds(route, cases);
    damaged(route, cases);
}

/// A body cut off everywhere, and one with a byte changed, left out or doubled, two hundred times.
fn damaged(route: &'static Route, cases: &mut Vec<Case>) {
    let fine = route.fine().into_bytes();
    for end in 1..fine.len() {
        cases.push(Case::body(route, format!("body cut off at {end}"), &fine[..end], Expect::Refused(400, "")));
    }
    let mut rng = Rng::new(0x2545_f491_4f6c_dd1d);
    for number in 0..200 {
        let mut body = fine.clone();
        let at = rng.below(body.len());
        match rng.below(3) {
            0 => drop(body.remove(at)),
            1 => body.insert(at, body[at]),
            _ => body[at] = rng.below(256) as u8,
        }
        // Some bytes bring about faults in the model under test.
        body.iter_mut().filter(|byte| b"!#$%".contains(byte)).for_each(|byte| *byte = b'+');
        let name = format!("body damaged at {at} ({number}): {}", body.escape_ascii());
        cases.push(Case::body(route, name, body, Expect::Sound));
    }
}

fn nonsense(route: &'static Route, cases: &mut Vec<Case>) {
    let fine = route.fine();
    let unfinished = &fine[..fine.len() - 1];
    let refused = Expect::Refused(400, "");
    let mut push =
        |name: &str, body: &[u8], expect| cases.push(Case::body(route, format!("body {name}"), body, expect));
    for body in ["", " ", "null", "7", "\"zqmarkerqz\"", "true", "[]", "zqmarkerqz", "<xml>zqmarkerqz</xml>", "a=b&c=d"]
    {
        push(body, body.as_bytes(), refused);
    }
    push("list", format!("[{fine}]").as_bytes(), refused);
    push("twice", format!("{fine}{fine}").as_bytes(), refused);
    push("trailing text", format!("{fine}{MARKER}").as_bytes(), refused);
    push("trailing NUL", format!("{fine}\0").as_bytes(), refused);
    push("trailing comma", format!("{unfinished},}}").as_bytes(), refused);
    push("unfinished", unfinished.as_bytes(), refused);
    push("byte order mark", format!("\u{feff}{fine}").as_bytes(), refused);
    push("comment", format!("/* {MARKER} */{fine}").as_bytes(), refused);
    push("single quotes", fine.replace('"', "'").as_bytes(), refused);
    push("UTF-16", &fine.encode_utf16().flat_map(u16::to_le_bytes).collect::<Vec<u8>>(), refused);
    push("key that is no text", b"{\"\xff\": 1}", refused);
    push("key without a value", format!("{unfinished},\"{MARKER}\"}}").as_bytes(), refused);
    push("ten thousand digits", format!("{unfinished},\"a\":{}}}", "9".repeat(10_000)).as_bytes(), refused);
    push("spaces", format!("{}{fine}{}", " ".repeat(1000), "\n".repeat(1000)).as_bytes(), Expect::Taken);
}

fn keys(route: &'static Route, cases: &mut Vec<Case>) {
    let fine = route.fine();
    let unfinished = &fine[..fine.len() - 1];
    let mut push = |name: &str, more: String, expect| {
        cases.push(Case::body(route, format!("key {name}"), format!("{unfinished},{more}}}"), expect));
    };
    for name in ["unknown_field", "__proto__", "constructor", "Temperature", "max-tokens"] {
        let shown: &'static str = name;
        push(name, format!("\"{name}\":\"{MARKER}\""), Expect::Refused(400, shown));
    }
    let unreadable = Expect::Refused(400, "(unreadable)");
    for name in [
        "",
        "a b",
        r"a\u0000b",
        "<script>zqmarkerqz</script>",
        r"\r\nzqmarkerqz: x",
        "../zqmarkerqz",
        "zqmarkerqz\u{e9}",
    ] {
        push(name, format!("\"{name}\":1"), unreadable);
    }
    push("of 1 MiB", format!("\"{}\":1", "k".repeat(1 << 20)), unreadable);
    let (field, json) = route.base[0];
    push("twice", format!("\"{field}\":{json}"), Expect::Refused(400, ""));
    let many: Vec<String> = (0..100_000).map(|number| format!("\"k{number}\":1")).collect();
    push("of a hundred thousand", many.join(","), Expect::Refused(400, ""));
}

fn sizes(route: &'static Route, cases: &mut Vec<Case>) {
    let refused = Expect::Refused(400, "");
    let mut push =
        |name: &str, body: Vec<u8>, expect| cases.push(Case::body(route, format!("body {name}"), body, expect));
    for (name, open) in [("lists", "["), ("objects", "{\"a\":"), ("both", "[{\"a\":")] {
        push(&format!("of a hundred thousand {name}"), open.repeat(100_000).into_bytes(), refused);
    }
    let deep = format!("{{\"a\":{}{}}}", "[".repeat(64), "]".repeat(64));
    push("of a million values", format!("{{\"a\":[{}0]}}", "0,".repeat(1_000_000)).into_bytes(), refused);
    push("one too deep", deep.into_bytes(), refused);
    let large = format!("{{\"{MARKER}\":\"{}\"}}", "x".repeat((4 << 20) - 16));
    push("one byte too large", large.into_bytes(), Expect::Refused(413, ""));
    // Refused by what its header says, whether or not it comes.
    for length in ["4194305", "9223372036854775807"] {
        let head = head(route, "");
        let request = format!("{head}content-length: {length}\r\n\r\n");
        cases.push(
            Case::raw(route, format!("length {length}"), request, Expect::Refused(413, "")).ending(Ending::Alone),
        );
    }
}

fn kinds(route: &'static Route, cases: &mut Vec<Case>) {
    let fine = route.fine();
    let json = "content-type: application/json\r\n";
    let mut push = |name: &str, fields: &str, body: &[u8], expect| {
        let head = head(route, "").replace(json, fields);
        let request = [head_with_length(&head, body.len()).as_bytes(), body].concat();
        cases.push(Case::raw(route, format!("header {name}"), request, expect));
    };
    let unknown = Expect::Refused(415, "");
    push("without a type", "", fine.as_bytes(), unknown);
    for kind in [
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=zqmarkerqz",
        "application/octet-stream",
        "text/json",
        "application/jsonx",
        "application/x-python-pickle",
        "application/json, text/plain",
        "",
        "zqmarkerqz",
        "application/\u{ff}json",
    ] {
        push(kind, &format!("content-type: {kind}\r\n"), fine.as_bytes(), unknown);
    }
    push("form", "content-type: application/x-www-form-urlencoded\r\n", b"prompt=zqmarkerqz", unknown);
    push(
        "charset",
        "content-type: application/json; charset=utf-16\r\n",
        fine.as_bytes(),
        Expect::TakenOrRefused(415, ""),
    );
    // A gzip bomb's first bytes: what is compressed is never inflated.
    let gzip =
        [0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 3, 0xed, 0xc1, 1, 1, 0, 0, 0, 0x80, 0x90, 0xfe, 0xaf, 0xee, 8, 0xa, 0, 0];
    push("gzip", &format!("{json}content-encoding: gzip\r\n"), &gzip, Expect::TakenOrRefused(400, ""));
    push("gzip without saying so", json, &gzip, Expect::Refused(400, ""));
    push(
        "gzip that is none",
        &format!("{json}content-encoding: gzip\r\n"),
        fine.as_bytes(),
        Expect::TakenOrRefused(415, ""),
    );
    push("upgrade", &format!("{json}connection: upgrade\r\nupgrade: websocket\r\n"), fine.as_bytes(), Expect::Taken);
    push("method override", &format!("{json}x-http-method-override: DELETE\r\n"), fine.as_bytes(), Expect::Taken);
    push(
        "forwarded",
        &format!("{json}x-forwarded-host: zqmarkerqz\r\nx-original-url: /health\r\n"),
        fine.as_bytes(),
        Expect::Taken,
    );
    push("request id", &format!("{json}x-request-id: {}\r\n", "i".repeat(129)), fine.as_bytes(), Expect::Taken);
    push(
        "trace parent",
        &format!("{json}traceparent: zqmarkerqz-\u{1f}\r\n").replace('\u{1f}', "%00"),
        fine.as_bytes(),
        Expect::Taken,
    );
    push("origin", &format!("{json}origin: http://zqmarkerqz.example\r\n"), fine.as_bytes(), Expect::Refused(403, ""));
    push("null origin", &format!("{json}origin: null\r\n"), fine.as_bytes(), Expect::Refused(403, ""));
}
