//! Below the body: lengths that lie, chunks that are none, paths and methods and hosts and keys
//! that are others'.

use super::{Case, Ending, Expect, KEY, MARKER, Route, head};

pub fn add(route: &'static Route, cases: &mut Vec<Case>) {
    lengths(route, cases);
    chunks(route, cases);
    headers(route, cases);
    targets(route, cases);
    keys(route, cases);
    if route.path == "/v1/responses" {
        names(route, cases);
    }
}

const BAD: &[u16] = &[400];
const BAD_OR_GONE: &[u16] = &[400, 0];

fn lengths(route: &'static Route, cases: &mut Vec<Case>) {
    let fine = route.fine();
    let length = fine.len();
    let mut push = |name: &str, fields: &str, body: &str, expect| {
        let request = format!("{}{fields}\r\n{body}", head(route, ""));
        let ending = if name == "too long" { Ending::HalfClosed } else { Ending::Alone };
        cases.push(Case::raw(route, format!("lengths {name}"), request, expect).ending(ending));
    };
    push("negative", "content-length: -1\r\n", &fine, Expect::Unsound(BAD));
    push("signed", &format!("content-length: +{length}\r\n"), &fine, Expect::Unsound(BAD));
    push("hexadecimal", "content-length: 0x10\r\n", &fine, Expect::Unsound(BAD));
    push("beyond 64 bits", "content-length: 18446744073709551616\r\n", &fine, Expect::Unsound(BAD));
    push("of 64 bits", "content-length: 18446744073709551615\r\n", &fine, Expect::Unsound(&[413, 431]));
    push("a list", &format!("content-length: {length}, {}\r\n", length + 1), &fine, Expect::Unsound(BAD));
    push(
        "two",
        &format!("content-length: {length}\r\ncontent-length: {}\r\n", length + 1),
        &fine,
        Expect::Unsound(BAD),
    );
    push("none", "", "", Expect::Refused(400, ""));
    push("too long", &format!("content-length: {}\r\n", length + 1), &fine, Expect::Unsound(BAD_OR_GONE));
    push("too short", &format!("content-length: {}\r\n", length - 1), &fine, Expect::Refused(400, ""));
    push(
        "chunked and a length",
        "content-length: 4\r\ntransfer-encoding: chunked\r\n",
        "0\r\n\r\n",
        Expect::Unsound(BAD),
    );
    push(
        "both, the other way",
        "transfer-encoding: chunked\r\ncontent-length: 4\r\n",
        "0\r\n\r\n",
        Expect::Unsound(BAD),
    );
    for coding in
        ["gzip", "chunked, gzip", "xchunked", "identity", "chunked, identity", " \x0bchunked", "deflate, zqmarkerqz"]
    {
        push(coding, &format!("transfer-encoding: {coding}\r\n"), "0\r\n\r\n", Expect::Unsound(BAD));
    }
    push("in a name with a space", "content-length : 4\r\n", "{}", Expect::Unsound(BAD));
    push("on a folded line", " content-length: 4\r\n", "{}", Expect::Unsound(BAD));
}

fn chunks(route: &'static Route, cases: &mut Vec<Case>) {
    let fine = route.fine();
    let chunked = head(route, "transfer-encoding: chunked\r\n\r\n");
    let bytes = |text: &str| text.bytes().map(|byte| format!("1\r\n{}\r\n", char::from(byte))).collect::<String>();
    let mut push = |name: &str, body: &str, expect| {
        cases.push(Case::raw(route, format!("chunks {name}"), format!("{chunked}{body}"), expect));
    };
    push("of one byte", &format!("{}0\r\n\r\n", bytes(&fine)), Expect::Taken);
    push("of one byte, nonsense", &format!("{}0\r\n\r\n", bytes(&MARKER.repeat(1000))), Expect::Refused(400, ""));
    push("none", "0\r\n\r\n", Expect::Refused(400, ""));
    let mut push = |name: &str, body: &str, expect| {
        let case = Case::raw(route, format!("chunks {name}"), format!("{chunked}{body}"), expect);
        cases.push(case.ending(Ending::HalfClosed));
    };
    for size in ["zz", "-1", "0x4", "fffffffffffffffff", "10000000000000000", "", "4 4"] {
        push(&format!("of size {size}"), &format!("{size}\r\n{fine}\r\n"), Expect::Unsound(BAD_OR_GONE));
    }
    push("longer than they say", &format!("2\r\n{fine}\r\n0\r\n\r\n"), Expect::Unsound(BAD_OR_GONE));
    push("without an end", &format!("{:x}\r\n{fine}\r\n", fine.len()), Expect::Unsound(BAD_OR_GONE));
    push(
        "with a long extension",
        &format!("2;{}\r\n{{}}\r\n0\r\n\r\n", MARKER.repeat(10_000)),
        Expect::Unsound(BAD_OR_GONE),
    );
    let trailers: String = (0..2000).map(|number| format!("t{number}: {MARKER}\r\n")).collect();
    push("with many trailers", &format!("2\r\n{{}}\r\n0\r\n{trailers}\r\n"), Expect::Unsound(&[400, 431, 0]));
}

fn headers(route: &'static Route, cases: &mut Vec<Case>) {
    let fine = route.fine();
    let length = fine.len();
    let mut push = |name: &str, fields: &str, expect| {
        let request = format!("{}content-length: {length}\r\n{fields}\r\n{fine}", head(route, ""));
        cases.push(Case::raw(route, format!("headers {name}"), request, expect).ending(Ending::Alone));
    };
    push("too large", &format!("x: {}\r\n", MARKER.repeat(4000)), Expect::Unsound(&[431]));
    push("too many", &(0..65).map(|number| format!("x{number}: y\r\n")).collect::<String>(), Expect::Unsound(&[431]));
    push("NUL", "x: a\0b\r\n", Expect::Unsound(BAD));
    push("no name", ": x\r\n", Expect::Unsound(BAD));
    push("no colon", "zqmarkerqz\r\n", Expect::Unsound(BAD));
    push("a second host", "host: zqmarkerqz\r\n", Expect::Refused(400, ""));
    push("expecting the odd", "expect: zqmarkerqz\r\n", Expect::Taken);
    let mut other_host = |name: &str, host: &str| {
        let request = head(route, "").replace("host: localhost\r\n", host);
        let request = format!("{request}content-length: {length}\r\n\r\n{fine}");
        cases.push(Case::raw(route, format!("host {name}"), request, Expect::Refused(400, "")).ending(Ending::Alone));
    };
    other_host("missing", "");
    for host in ["", "a b", "u@localhost", "localhost:99999", "[::1", "a/b", "localhost:x", "zqmarkerqz\u{e9}"] {
        other_host(host, &format!("host: {host}\r\n"));
    }
}

fn targets(route: &'static Route, cases: &mut Vec<Case>) {
    let (fine, path) = (route.fine(), route.path);
    let length = fine.len();
    let mut push = |line: String, expect| {
        let request = head(route, "").replace(&format!("POST {path} HTTP/1.1"), &line);
        let request = format!("{request}content-length: {length}\r\n\r\n{fine}");
        let name: String = format!("line {line}").chars().take(60).collect();
        cases.push(Case::raw(route, name, request, expect).ending(Ending::Alone));
    };
    for method in ["GET", "PUT", "DELETE", "PATCH", "TRACE", "OPTIONS", "ZQMARKERQZ", "post"] {
        push(format!("{method} {path} HTTP/1.1"), Expect::Refused(405, ""));
    }
    let rest = &path[1..];
    let nowhere = [
        format!("/{path}"),
        format!("{path}/"),
        format!("{path}."),
        format!("{path}//"),
        format!("{path}%00"),
        format!("{path};zqmarkerqz"),
        format!("/.{path}"),
        format!("/x/..{path}"),
        format!("/%2e%2e{path}"),
        format!("/%2f{rest}"),
        path.replace('e', "%65"),
        path.to_uppercase(),
        "/..%2f..%2fetc/passwd".into(),
        "/%ff%fe".into(),
        format!("/{MARKER}"),
    ];
    for target in nowhere {
        push(format!("POST {target} HTTP/1.1"), Expect::Refused(404, ""));
    }
    push(format!("POST {path}?zqmarkerqz=../..&a[]=%00 HTTP/1.1"), Expect::Taken);
    push(format!("POST http://localhost{path} HTTP/1.1"), Expect::Taken);
    push(format!("POST http://zqmarkerqz.example{path} HTTP/1.1"), Expect::Refused(400, ""));
    push(format!("POST http://u:p@localhost{path} HTTP/1.1"), Expect::Refused(400, ""));
    push(format!("POST {rest} HTTP/1.1"), Expect::Unsound(&[400, 404]));
    push(format!("POST {path} HTTP/9.9"), Expect::Unsound(BAD));
    push(format!("POST {path}"), Expect::Unsound(BAD));
    push(format!("POST  {path} HTTP/1.1"), Expect::Unsound(BAD));
    push(format!("POST {path}\0 HTTP/1.1"), Expect::Unsound(BAD));
    push(format!("POST /{} HTTP/1.1", MARKER.repeat(4000)), Expect::Unsound(&[414, 431]));
    push(format!("POST {path} HTTP/1.1\r\nzqmarkerqz"), Expect::Unsound(BAD));
}

/// Names in addresses, of things that are not there.
fn names(route: &'static Route, cases: &mut Vec<Case>) {
    let long = MARKER.repeat(1000);
    let names = [
        "..%2f..%2fetc%2fpasswd",
        "../../etc/passwd",
        "%ff",
        "%00",
        "%",
        "%zz",
        "zqmarkerqz",
        "a%0d%0ax:%20y",
        &long,
        "%2e",
    ];
    for (method, before, after) in [
        ("GET", "/v1/models/", ""),
        ("GET", "/v1/responses/", ""),
        ("DELETE", "/v1/responses/", ""),
        ("GET", "/v1/responses/", "/input_items"),
    ] {
        for name in names {
            let line = format!("{method} {before}{name}{after} HTTP/1.1");
            let request = format!("{line}\r\nhost: localhost\r\nauthorization: Bearer {KEY}\r\n\r\n");
            let name: String = line.chars().take(60).collect();
            cases.push(Case::raw(route, name, request, Expect::Refused(404, "")));
        }
    }
    for (query, field) in [
        ("?stream=true", "stream"),
        ("?zqmarkerqz%00=1", "(unreadable)"),
        ("/input_items?limit=0", "limit"),
        ("/input_items?limit=18446744073709551616", "limit"),
        ("/input_items?order=zqmarkerqz", "order"),
    ] {
        let request =
            format!("GET /v1/responses/a{query} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {KEY}\r\n\r\n");
        cases.push(Case::raw(route, format!("query {query}"), request, Expect::TakenOrRefused(400, field)));
    }
}

fn keys(route: &'static Route, cases: &mut Vec<Case>) {
    let (fine, path) = (route.fine(), route.path);
    let length = fine.len();
    let right = format!("authorization: Bearer {KEY}\r\n");
    let mut push = |name: &str, path: &str, fields: &str| {
        let request = head(route, "").replace(&right, fields).replacen(route.path, path, 1);
        let request = format!("{request}content-length: {length}\r\n\r\n{fine}");
        cases.push(Case::raw(route, format!("key {name}"), request, Expect::Refused(401, "")).ending(Ending::Alone));
    };
    push("missing", path, "");
    for value in [
        "".into(),
        "Bearer".into(),
        "Bearer ".into(),
        format!("Bearer {MARKER}{MARKER}"),
        format!("Bearer {}", &KEY[1..]),
        format!("Bearer {KEY}0"),
        format!("Bearer {}", KEY.to_uppercase()),
        format!("Basic {KEY}"),
        format!("Bearer Bearer {KEY}"),
        format!("Bearer {KEY},{KEY}"),
        KEY.to_string(),
        format!("Bearer {}", "x".repeat(5000)),
    ] {
        let shown: String = value.chars().take(20).collect();
        push(&shown, path, &format!("authorization: {value}\r\n"));
    }
    push("twice", path, &format!("{right}{right}"));
    push("another beside it", path, &format!("{right}x-api-key: {MARKER}{MARKER}\r\n"));
    push("in a cookie", path, &format!("cookie: authorization=Bearer {KEY}\r\n"));
    push("in the query", &format!("{path}?api_key={KEY}"), "");
    for other in [
        format!("/{path}"),
        format!("{path}/../health"),
        "/health/".into(),
        format!("/health%2f..{path}"),
        "/HEALTH".into(),
    ] {
        push(&other.clone(), &other, "");
    }
}
