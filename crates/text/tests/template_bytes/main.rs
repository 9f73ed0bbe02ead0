//! Templates that grow: in whatever way a template makes its values larger, it ends with an error
//! and holds little until then.
//!
//! The one test is alone in its program, since other tests would be counted too.
#![allow(unsafe_code)] // a global allocator that counts

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

use folio_text::{ChatRender, ChatTemplate, Error, SpecialTokens, WallTime};
use serde_json::json;

struct Counting;

static LIVE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call goes to the system's allocator unchanged; only the bytes are noted beside it.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        PEAK.fetch_max(LIVE.fetch_add(layout.size(), SeqCst) + layout.size(), SeqCst);
        // SAFETY: the caller's promises are passed on as they are.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), SeqCst);
        // SAFETY: the caller's promises are passed on as they are.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Most bytes of a render of a conversation of a few bytes.
const MOST_BYTES: usize = 64 << 20;

fn render(source: &str) -> Result<String, Error> {
    let request = ChatRender {
        messages: vec![json!({"role": "user", "content": "hi"})],
        now: Some(WallTime::from_unix(0, 0)),
        ..Default::default()
    };
    ChatTemplate::new(source, SpecialTokens::default())?.render(&request)
}

/// How it ended, and the most bytes it held.
fn measure(source: &str) -> (Result<usize, String>, usize) {
    let before = LIVE.load(SeqCst);
    PEAK.store(before, SeqCst);
    let rendered = render(source).map(|text| text.len()).map_err(|error| error.to_string());
    (rendered, PEAK.load(SeqCst) - before)
}

/// `step` is run over and over, and begins with a text in `ns.s`, a list in `ns.l` and a mapping in
/// `ns.d`.
fn repeated(step: &str) -> String {
    let start = "{% set ns = namespace(s='abcdefgh' * 1000, l=['abcdefgh' * 100] * 100, d={}) %}";
    format!("{start}{{% for i in range(40) %}}{{% for j in range(9999) %}}{step}{{% endfor %}}{{% endfor %}}")
}

const NESTED: &str = "{% set ns.n = ns.l %}{% for k in range(60) %}{% set ns.n = [ns.n, ns.n] %}{% endfor %}";

#[test]
fn templates_that_grow_end_before_they_hold_much() {
    const HOLDS: &str = "bytes at once";
    const WORKS: &str = "has handled more than";
    const DEEP: &str = "deep";
    const WRITES: &str = "chat template wrote more than";
    const RUNS: &str = "instructions";
    // The repeated operation, and parts of its possible errors.
    let steps: [(&str, &[&str]); 48] = [
        // Operators.
        ("{% set ns.s = ns.s ~ ns.s %}", &[HOLDS]),
        ("{% set ns.s = ns.s + ns.s %}", &[HOLDS]),
        ("{% set ns.s = ns.s * 2 %}", &[HOLDS]),
        ("{% set ns.s = 2 * ns.s %}", &[HOLDS]),
        ("{% set ns.s = ns.s ~ ns.s ~ ns.s ~ (ns.s ~ ns.s) %}", &[HOLDS]),
        ("{% set ns.l = ns.l + ns.l %}", &[HOLDS]),
        ("{% set ns.l = ns.l * 2 %}", &[HOLDS]),
        ("{% set ns.l = (1, 2) * 99999999 %}", &[HOLDS]),
        ("{% set ns.l = ns.l + [ns.s ~ j] %}", &[HOLDS]),
        ("{% set ns.l = ns.l + [ns.s[j:]] %}", &[HOLDS]),
        ("{% set ns.l = [ns.l[:], ns.l[:]] + ns.l[::-1] + ns.l %}", &[HOLDS, DEEP]),
        ("{% set ns.s = [ns.s, ns.s] ~ '' %}", &[HOLDS]),
        // Values that hold themselves.
        ("{% set ns.l = [ns.l] %}", &[DEEP]),
        ("{% set ns.d = {'a': ns.d, 'b': ns.d} %}", &[DEEP]),
        ("{% set ns.d = dict(a=ns.d) %}", &[DEEP]),
        ("{% set ns.l = (ns.l, ns.l) %}", &[DEEP]),
        ("{% set ns.ns = ns %}", &["namespace"]),
        ("{% set ns.ns = [ns] %}", &["namespace"]),
        ("{% set ns.ns = namespace(ns=ns) %}", &["namespace"]),
        // Captures and macros.
        ("{% set ns.s %}{{ ns.s }}{{ ns.s }}{% endset %}", &[HOLDS, WRITES]),
        ("{% set ns.s %}{{ ns.s }}{% for k in ns.l %}text as it stands{% endfor %}{% endset %}", &[HOLDS, WRITES]),
        (
            "{% macro m() %}{{ ns.s }}{{ caller() }}{% endmacro %}{% set ns.s %}{% call m() %}x{% endcall %}{% endset %}",
            &[HOLDS, WRITES, RUNS],
        ),
        ("{% macro m(x) %}{{ x }}{{ x }}{% endmacro %}{% set ns.s = m(ns.s) %}", &[HOLDS, WRITES]),
        ("{% macro m(a, b, c) %}{{ ns }}{{ a }}{% endmacro %}", &[HOLDS]),
        ("{% filter upper %}{{ ns.s }}{% endfilter %}", &[WRITES]),
        // Filters.
        ("{% set ns.s = ns.s|replace('a', ns.s) %}", &[HOLDS]),
        ("{% set ns.s = ns.s|replace('', ns.s) %}", &[HOLDS]),
        ("{% set ns.s = ns.l|join(ns.s) %}", &[HOLDS]),
        ("{% set ns.l = [ns.l|join, ns.l|join] * 2 %}", &[HOLDS]),
        ("{% set ns.s = ns.s|list|join(', ') %}", &[HOLDS]),
        ("{% set ns.s = (ns.s ~ '\\n\\n')|indent(1000, true, true) %}", &[HOLDS]),
        ("{% set ns.s = ns.s|indent(ns.s, true) %}", &[HOLDS]),
        ("{% set ns.s = ns.s|tojson|tojson %}", &[HOLDS]),
        ("{% set ns.s = '<' * 9 ~ ns.s|escape|replace('&', '<') %}", &[WORKS]),
        ("{% set ns.s = '%s%s'|format(ns.s, ns.s) %}", &[HOLDS]),
        ("{% set ns.s = '%99999999s'|format('') %}", &[HOLDS]),
        ("{% set ns.s = '%*d'|format(99999999, 1) %}", &[HOLDS]),
        ("{% set ns.l = ns.l|batch(99999999, 'x') %}", &[HOLDS]),
        ("{% set ns.l = ns.l|slice(99999999) %}", &[HOLDS]),
        ("{% set ns.l = ns.l|map('upper')|list + ns.l|map('string')|list %}", &[HOLDS]),
        ("{% set ns.l = zip(ns.l, ns.l)|list %}{% set ns.l = ns.l|zip(ns.l)|list + ns.l %}", &["unknown"]),
        ("{% set ns.l = (ns.l|zip(ns.l)|list) + ns.l %}", &[HOLDS, DEEP]),
        ("{% set ns.l = ns.l|chain(ns.l)|list %}", &[HOLDS]),
        ("{% set ns.s = [ns.s, ns.s]|sum(start='') %}", &[HOLDS]),
        ("{% set ns.l = ns.l + range(9999)|list %}", &[HOLDS]),
        // Methods and functions.
        ("{% set ns.s = ns.s.replace('a', ns.s) %}", &[HOLDS]),
        ("{% set ns.s = '{:>99999999}'.format('') %}", &[HOLDS]),
        ("{% set ns.l = ns.l + [cycler(*ns.l)] %}", &[HOLDS]),
    ];
    let texts = [
        (NESTED.to_owned() + "{{ ns.n }}", HOLDS),
        (NESTED.to_owned() + "{{ ns.n|tojson }}", HOLDS),
        (NESTED.to_owned() + "{% set x = ns.n|string %}", HOLDS),
        (NESTED.to_owned() + "{% set x = ns.n ~ '' %}", HOLDS),
        (NESTED.to_owned() + "{% set x = ns.n|pprint %}", HOLDS),
        (NESTED.to_owned() + "{% set x = ns.n|upper %}", HOLDS),
        (NESTED.to_owned() + "{{ raise_exception(ns.n) }}", HOLDS),
        (NESTED.to_owned() + "{{ ns.n|join }}", HOLDS),
        (NESTED.to_owned() + "{{ ns.n|tojson(indent=64) }}", HOLDS),
        (NESTED.to_owned() + "{% set a = ns.n %}" + NESTED + "{{ a == ns.n }}", WORKS),
        (NESTED.to_owned() + "{% set a = ns.n %}" + NESTED + "{{ [a, ns.n]|sort }}", WORKS),
    ];
    let once = |source: &str| format!("{{% set ns = namespace(l=['a']) %}}{source}");
    let folded = format!("{{% set x = [{}] %}}", "'a' * 99999999, ".repeat(50));
    let summed = format!("{{% set x = {} %}}", ["'a' * 9999999"; 50].join(" ~ "));
    let calls =
        ["join([ns.s, ns.s])", "join(ns.s)", "title() ~ ns.s", "center(65536, 'é') ~ ns.s", "split('a') ~ ns.s"];
    let methods = calls.map(|call| (repeated(&format!("{{% set ns.s = ns.s.{call} %}}")), HOLDS));
    let dates = (repeated("{% set ns.s = strftime_now(ns.s ~ '%c%c%c%c') %}"), HOLDS);
    let loops = "{% for a in ns.l if true %}".repeat(20) + &"{% endfor %}".repeat(20);
    let loops = (format!("{{% set ns = namespace(l=range(99999)|list) %}}{loops}"), HOLDS);
    let arguments = "*ns.l, ".repeat(60);
    let arguments = (format!("{{% set ns = namespace(l=range(99999)|list) %}}{{{{ cycler({arguments}1) }}}}"), HOLDS);

    let mut worst = 0;
    let mut failures = Vec::new();
    let mut check = |source: &str, expected: &[&str]| {
        let (rendered, bytes) = measure(source);
        worst = worst.max(bytes);
        let is_expected = rendered.as_ref().is_err_and(|error| expected.iter().any(|part| error.contains(part)));
        if !is_expected || bytes > MOST_BYTES {
            let source: String = source.chars().rev().take(160).collect::<Vec<_>>().into_iter().rev().collect();
            failures.push(format!("{} MiB, {rendered:?}: ...{source}", bytes >> 20));
        }
    };
    for (step, expected) in steps {
        check(&repeated(step), expected);
    }
    for (source, expected) in texts {
        check(&once(&source), &[expected]);
    }
    for (source, expected) in methods.iter().chain([&dates, &loops, &arguments]) {
        check(source, &[expected]);
    }
    for source in [folded, summed] {
        check(&source, &[HOLDS]);
    }
    println!("{} MiB at most", worst >> 20);
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}
