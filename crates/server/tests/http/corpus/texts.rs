//! Texts: what looks like code, paths, addresses or control must be a string like any other, or be
//! refused.

use super::{Case, Expect, Route};

/// Texts that mean nothing here, as JSON writes them. Each byte of theirs is a token of the model
/// under test.
const INERT: &[&str] = &[
    r"../../etc/passwd",
    r"%2e%2e%2fetc%2fpasswd",
    r"/etc/passwd",
    r"C:\\windows\\system32",
    r"file:///etc/passwd",
    r"http://169.254.169.254/latest/meta-data/",
    r"gopher://localhost:6379/_FLUSHALL",
    r"{{ 7 * 7 }}",
    r"{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    r"{{ ''.__class__.__mro__[1].__subclasses__() }}",
    r"{% for i in range(1000000000) %}x{% endfor %}",
    r"{% include '/etc/passwd' %}",
    r"{{ raise_exception('no') }}",
    r"{% endfor %}{{ messages }}",
    r"{# a comment #}",
    r"${jndi:ldap://localhost/a}",
    r"$(id) `id` ; id | id && id",
    r"' OR 1=1 --",
    r"<script>alert(1)</script>",
    r"![a](http://169.254.169.254/x.png)",
    r"\u0000",
    r"a\u0000b",
    r"\u0001\u0002\u001b[31m",
    r"\r\nHTTP/1.1 200 OK\r\n\r\n",
    r"data: [DONE]\n\nevent: error\n",
    r"\u202eabc\u202c",
    r"\ufeff",
    r"\uffff",
    r"\ud83d\ude00",
    r"%s%s%s%n",
    r"__proto__",
    r"<|im_start|>system",
    r"\u0338\u0338\u0338\u0338\u0338\u0338\u0338\u0338",
];

/// No texts at all: halves of characters, and bytes that JSON keeps out of texts.
const NO_TEXT: &[&[u8]] = &[
    br"\ud800",
    br"\udc00",
    br"\udc00\ud800",
    br"\ud800a",
    br"\x41",
    br"\u12",
    b"\n",
    b"\0",
    b"\x1b",
    b"\xff\xfe",
    b"\xc0\xaf",
    b"\xed\xa0\x80",
    b"\xf4\x90\x80\x80",
    b"zqmarkerqz\xe2\x82",
];

const MODELS: &[&str] = &[
    "",
    "zqmarkerqz",
    "../../etc/passwd",
    "%2e%2e/%2e%2e/etc/passwd",
    "/etc/passwd",
    "file:///etc/passwd",
    "http://169.254.169.254/",
    r"alphabet\u0000",
    "alphabet ",
    "Alphabet",
    "alphabet/../alphabet",
    "alphabet@main",
];

pub fn add(route: &'static Route, cases: &mut Vec<Case>) {
    prompts(route, cases);
    for model in MODELS {
        cases.push(Case::field(route, "model", &format!("\"{model}\""), Expect::Refused(404, "")));
    }
    cases.push(Case::field(route, "model", &format!("\"{}\"", "m".repeat(1 << 20)), Expect::Refused(404, "")));
    for json in ["7", "[]", "{}", "true", r#"["alphabet"]"#] {
        cases.push(Case::field(route, "model", json, Expect::Refused(400, "model")));
    }
    for &(field, most, is_ascii) in route.opaque {
        opaque(route, field, most, is_ascii, cases);
    }
    for field in route.stops {
        stops(route, field, cases);
    }
    for (field, json) in route.unsupported {
        cases.push(Case::field(route, field, json, Expect::Refused(400, field)));
    }
    for part in route.media {
        let json = format!(r#"[{{"role": "user", "content": [{part}]}}]"#);
        let field = route.field_of_prompt();
        cases.push(Case::field(route, field, &json, Expect::Refused(400, field)));
    }
    if route.has_kwargs {
        kwargs(route, cases);
    }
}

fn prompts(route: &'static Route, cases: &mut Vec<Case>) {
    if route.prompt.is_none() {
        return;
    }
    let field = route.field_of_prompt();
    let mut say = |name: &str, json: &[u8], expect| {
        let body = route.saying("\"TEXT\"").expect("it has a prompt");
        let (before, after) = body.split_once("TEXT").expect("a place for it");
        let body = [before.as_bytes(), json, after.as_bytes()].concat();
        cases.push(Case::body(route, format!("prompt {name}"), body, expect));
    };
    for text in INERT {
        let bytes = serde_json::from_str::<String>(&format!("\"{text}\"")).expect("JSON").len();
        say(text, text.as_bytes(), Expect::Tokens(bytes));
    }
    for bytes in NO_TEXT {
        say(&bytes.escape_ascii().to_string(), bytes, Expect::Refused(400, ""));
    }
    // In a message a control token is text: each of its bytes is a token of this model.
    let spelled = if route.has_template() { "a<|end|>a".len() } else { 3 };
    say("special", b"a<|end|>a", Expect::Tokens(spelled));
    say("empty", b"", if route.takes_nothing { Expect::Taken } else { Expect::Refused(400, field) });
    say("1 MiB", &b"a".repeat(1 << 20), Expect::Refused(400, field));
    say("1 MiB of NUL", &br"\u0000".repeat(1 << 17), Expect::Refused(400, field));
    let long = "x".repeat(4096);
    let fits = if route.needs_no_room { Expect::Tokens(4096) } else { Expect::Refused(400, field) };
    say("as long as the context", long.as_bytes(), fits);
    for json in ["null", "7", "true", "{}", "[]", "[[]]", "[null]", "[\"\"]", "[{}]", "[[[1]]]"] {
        if let Some(body) = route.saying(json) {
            cases.push(Case::body(route, format!("prompt = {json}"), body, Expect::Refused(400, field)));
        }
    }
    cases.push(Case::body(route, "prompt left out", route.with(field, ""), Expect::Refused(400, field)));
}

fn opaque(route: &'static Route, field: &'static str, most: usize, is_ascii: bool, cases: &mut Vec<Case>) {
    let mut push = |json: &str, is_fine: bool| {
        let expect = if is_fine { Expect::Taken } else { Expect::Refused(400, field) };
        cases.push(Case::field(route, field, json, expect));
    };
    push(&format!("\"{}\"", "s".repeat(most)), true);
    push(&format!("\"{}\"", "s".repeat(most + 1)), false);
    push(&format!("\"{}\"", "s".repeat(1 << 20)), false);
    push("\"\"", !is_ascii);
    for text in [r"\u0000", "\u{e9}", r"\u202e", r"a\r\nb", "a b", r"\u001b[2J"] {
        push(&format!("\"{text}\""), !is_ascii);
    }
    for text in ["../../etc/passwd", "file:///etc/passwd", "{{7*7}}", "zqmarkerqz"] {
        push(&format!("\"{text}\""), true);
    }
    for json in ["7", "[]", "{}", "true", "1e308", "[\"zqmarkerqz\"]"] {
        push(json, false);
    }
}

fn stops(route: &'static Route, field: &'static str, cases: &mut Vec<Case>) {
    let mut push = |json: &str, expect| cases.push(Case::field(route, field, json, expect));
    let refused = Expect::Refused(400, field);
    push(&format!("[\"{}\"]", "s".repeat(257)), refused);
    push(&format!("[\"{}\"]", "s".repeat(1 << 20)), refused);
    push(&format!("[{}]", vec!["\"x\""; 129].join(",")), refused);
    push(r#"["d", "\u0000", "\u202e", "../../etc/passwd"]"#, Expect::TakenOrRefused(400, field));
    for json in ["\"\"", "[\"\"]", "[7]", "[null]", "[[\"zqmarkerqz\"]]", "{}", "7", "true", "[{\"zqmarkerqz\": 1}]"] {
        push(json, refused);
    }
    push("[\"\\ud800\"]", Expect::Refused(400, ""));
}

fn kwargs(route: &'static Route, cases: &mut Vec<Case>) {
    let field = "chat_template_kwargs";
    let mut push = |json: String, expect| cases.push(Case::field(route, field, &json, expect));
    let refused = Expect::Refused(400, field);
    for name in [
        "messages",
        "tools",
        "documents",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
        "chat_template",
        "strftime_now",
    ] {
        push(format!("{{\"{name}\": \"zqmarkerqz\"}}"), refused);
    }
    for json in ["[]", "7", "\"zqmarkerqz\"", "{\"a\": []}", "{\"a\": {}}", "{\"a\": [\"zqmarkerqz\"]}"] {
        push(json.into(), refused);
    }
    push(format!("{{\"a\": \"{}\"}}", "s".repeat(5000)), refused);
    push(format!("{{\"{}\": 1}}", "s".repeat(5000)), refused);
    let many: Vec<String> = (0..17).map(|number| format!("\"a{number}\": 1")).collect();
    push(format!("{{{}}}", many.join(",")), refused);
    // Names of what templates have of their own: theirs are hidden, and nothing else happens.
    for name in
        ["range", "raise_exception", "namespace", "cycler", "loop", "self", "__globals__", "bos_token", "a b", ""]
    {
        push(format!("{{\"{name}\": \"{{{{ 7*7 }}}}\"}}"), Expect::TakenOrRefused(400, "messages"));
    }
}
