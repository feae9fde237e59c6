"""Requests that providers' own libraries have signed, or that they have found rightly signed.

Prints a JSON list. Each element is one source: its preset, its secrets, and a request: query, headers, body, and the same
body with one byte changed (null where the provider does not sign the body). The argument is the public URL of a gateway;
a source called NAME is at /in/NAME there.
"""

import base64
import datetime
import hashlib
import hmac
import json
import sys
import time
import urllib.parse
import uuid

BASE = sys.argv[1]
NOW = int(time.time())
REQUESTS = []


def altered(body):
    """The body with its last letter or digit changed to another one."""
    for at in range(len(body) - 1, -1, -1):
        if body[at].isascii() and body[at].isalnum():
            return body[:at] + ("x" if body[at] != "x" else "y") + body[at + 1 :]
    raise ValueError("nothing to change")


def request(name, preset, secrets, headers, body, query="", signs_body=True):
    headers = {"Content-Type": "application/json", **headers}
    REQUESTS.append(
        {
            "name": name,
            "preset": preset,
            "secrets": secrets,
            "query": query,
            "headers": list(headers.items()),
            "body": body,
            "altered": altered(body) if signs_body else None,
        }
    )


def url(name, query=""):
    return f"{BASE}/in/{name}{query}"


def fresh(prefix=""):
    return prefix + uuid.uuid4().hex


def mac(key, content, hash=hashlib.sha256):
    return hmac.new(key.encode(), content.encode(), hash)


def stripe():
    from stripe import WebhookSignature

    secret = fresh("whsec_")
    body = json.dumps({"id": fresh("evt_"), "object": "event", "type": "charge.succeeded", "name": "Zoë"})
    signature = WebhookSignature._compute_signature(f"{NOW}.{body}", secret)
    header = f"t={NOW},v1={signature}"
    assert WebhookSignature.verify_header(body, header, secret, tolerance=300)
    request("stripe-event", "stripe", [secret], {"Stripe-Signature": header}, body)


def standard_webhooks():
    from standardwebhooks import Webhook

    secret = "whsec_" + base64.b64encode(uuid.uuid4().bytes * 2).decode()
    body, id = json.dumps({"type": "user.created", "data": {"name": "Zoë"}}), fresh("msg_")
    when = datetime.datetime.fromtimestamp(NOW, datetime.timezone.utc)
    signature = Webhook(secret).sign(id, when, body)
    headers = {"webhook-id": id, "webhook-timestamp": str(NOW), "webhook-signature": signature}
    Webhook(secret).verify(body, headers)
    request("standard", "standard-webhooks", [secret], headers, body)


def svix():
    from svix.webhooks import Webhook

    secret = "whsec_" + base64.b64encode(uuid.uuid4().bytes * 2).decode()
    body, id = json.dumps({"type": "invoice.paid", "data": {"id": 1}}), fresh("msg_")
    when = datetime.datetime.fromtimestamp(NOW, datetime.timezone.utc)
    headers = {
        "svix-id": id,
        "svix-timestamp": str(NOW),
        "svix-signature": Webhook(secret).sign(id, when, body),
    }
    Webhook(secret).verify(body, headers)
    request("svix", "svix", [fresh_key(), secret], headers, body)


def fresh_key():
    """Another secret, of which nothing is signed: a rotation."""
    return "whsec_" + base64.b64encode(uuid.uuid4().bytes * 2).decode()


def twilio():
    from twilio.request_validator import RequestValidator

    token = fresh()
    form = {"MessageSid": fresh("SM"), "MessageStatus": "delivered", "Body": "a&b = 'ü'", "To": "+15005550006"}
    header = {"Content-Type": "application/x-www-form-urlencoded"}
    for name, preset in [("twilio", "twilio"), ("twilio-form", "twilio-form")]:
        signature = RequestValidator(token).compute_signature(url(name), form)
        assert RequestValidator(token).validate(url(name), form, signature)
        headers = {**header, "X-Twilio-Signature": signature, "I-Twilio-Idempotency-Token": fresh()}
        request(name, preset, [token], headers, urllib.parse.urlencode(form))
    signature = RequestValidator(token).compute_signature(url("twilio-shared"), form, "HMAC_SHA256")
    headers = {**header, "X-Twilio-Signature": signature, "I-Twilio-Idempotency-Token": fresh()}
    request("twilio-shared", "twilio-shared-key", [token], headers, urllib.parse.urlencode(form))

    body = json.dumps({"id": fresh(), "text": "ü"})
    query = "?bodySHA256=" + RequestValidator(token).compute_hash(body)
    signature = RequestValidator(token).compute_signature(url("twilio-json", query), {})
    assert RequestValidator(token).validate(url("twilio-json", query), body, signature)
    headers = {"X-Twilio-Signature": signature, "I-Twilio-Idempotency-Token": fresh()}
    request("twilio-json", "twilio", [token], headers, body, query)


def slack():
    from slack_sdk.signature import SignatureVerifier

    secret = fresh()
    body = json.dumps({"type": "event_callback", "event_id": fresh("Ev"), "event": {"type": "message"}})
    signature = SignatureVerifier(secret).generate_signature(timestamp=str(NOW), body=body)
    headers = {"X-Slack-Request-Timestamp": str(NOW), "X-Slack-Signature": signature}
    assert SignatureVerifier(secret).is_valid_request(body, headers)
    request("slack", "slack", [secret], headers, body)
    form = urllib.parse.urlencode({"command": "/go", "text": "now", "trigger_id": fresh()})
    signature = SignatureVerifier(secret).generate_signature(timestamp=str(NOW), body=form)
    headers = {**headers, "X-Slack-Signature": signature, "Content-Type": "application/x-www-form-urlencoded"}
    request("slack-command", "slack", [secret], headers, form)


def hubspot():
    from hubspot.utils.signature import Signature

    secret = str(uuid.uuid4())
    event = {"eventId": uuid.uuid4().int % 10**9, "subscriptionId": 7, "occurredAt": NOW * 1000, "attemptNumber": 0}
    body = json.dumps([event])
    for version, name in [("v1", "hubspot-v1"), ("v2", "hubspot-v2"), ("v3", "hubspot-v3")]:
        stamp = str(NOW * 1000)
        signature = Signature.get_signature(secret, body, version, url(name), "POST", stamp)
        if version == "v3":
            headers = {"X-HubSpot-Signature-v3": signature, "X-HubSpot-Request-Timestamp": stamp}
        else:
            headers = {"X-HubSpot-Signature": signature, "X-HubSpot-Signature-Version": version}
        request(name, name, [secret], headers, body)


def braintree():
    from braintree import BraintreeGateway, Configuration, Environment, WebhookNotification

    configuration = Configuration(Environment.Sandbox, "merchant", "public", fresh())
    gateway = BraintreeGateway(configuration)
    kind = WebhookNotification.Kind.SubscriptionWentPastDue
    sample = gateway.webhook_testing.sample_notification(kind, fresh())
    gateway.webhook_notification.parse(sample["bt_signature"], sample["bt_payload"].decode())
    headers = {"Content-Type": "application/x-www-form-urlencoded"}
    # The signature first, so that the byte that is changed is one of the payload.
    body = urllib.parse.urlencode(sample)
    request("braintree", "braintree", [configuration.private_key], headers, body)


def adyen():
    from Adyen.util import generate_notification_sig, generate_payload_sig, is_valid_hmac_notification

    key = fresh().upper()

    def item(success):
        fields = {
            "amount": {"value": 1130, "currency": "EUR"},
            "pspReference": fresh(),
            "eventCode": "AUTHORISATION",
            "merchantAccountCode": "Shop",
            "merchantReference": "Zoë: \\ /",
            "success": success,
        }
        signature = generate_notification_sig(fields, key).decode()
        signed = {**fields, "additionalData": {"hmacSignature": signature}}
        assert is_valid_hmac_notification(signed, key)
        return {"NotificationRequestItem": signed}

    body = json.dumps({"live": "false", "notificationItems": [item("true"), item("false")]}, ensure_ascii=False)
    request("adyen", "adyen", [key], {}, body, signs_body=False)
    body = json.dumps({"id": fresh(), "type": "balancePlatform.transfer.created"})
    signature = generate_payload_sig(body.encode(), key).decode()
    request("adyen-header", "adyen-header", [key], {"HmacSignature": signature}, body)


def box():
    from box_sdk_gen.internal.utils import compute_webhook_signature

    secret, other = fresh(), fresh()
    for name, text, escape in [("box", "Test.txt", False), ("box-escaped", "Zo\u00eb \U0001f600 \\/ x", True)]:
        body = json.dumps({"type": "webhook_event", "id": fresh(), "source": {"name": text}}, ensure_ascii=False)
        headers = {
            "box-delivery-id": str(uuid.uuid4()),
            "box-delivery-timestamp": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "box-signature-algorithm": "HmacSHA256",
            "box-signature-version": "1",
        }
        signature = compute_webhook_signature(body, headers, secret, escape)
        headers["box-signature-secondary"] = signature
        request(name, "box", [other, secret], headers, body)


def github():
    from gidgethub import sansio

    secret, body = fresh(), json.dumps({"action": "opened", "issue": {"title": "Zoë"}})
    signature = "sha256=" + mac(secret, body).hexdigest()
    sansio.validate_event(body.encode(), signature=signature, secret=secret)
    headers = {"X-Hub-Signature-256": signature, "X-GitHub-Delivery": str(uuid.uuid4()), "X-GitHub-Event": "issues"}
    request("github", "github", [secret], headers, body)


def razorpay():
    import razorpay

    secret, body = fresh(), json.dumps({"event": "payment.captured", "payload": {}}, indent="\t")
    signature = mac(secret, body).hexdigest()
    razorpay.Client(auth=("a", "b")).utility.verify_webhook_signature(body, signature, secret)
    request("razorpay", "razorpay", [secret], {"X-Razorpay-Signature": signature, "x-razorpay-event-id": fresh()}, body)


def easypost():
    from easypost.util import validate_webhook

    # The ligature is two letters once the secret is normalized.
    secret, body = fresh() + "\ufb01", json.dumps({"id": fresh("evt_"), "description": "tracker.updated"})
    import unicodedata

    signature = "hmac-sha256-hex=" + mac(unicodedata.normalize("NFKD", secret), body).hexdigest()
    validate_webhook(body.encode(), {"X-Hmac-Signature": signature}, secret)
    request("easypost", "easypost", [secret], {"X-Hmac-Signature": signature}, body)


def square():
    from square.utils.webhooks_helper import verify_signature

    key, body = fresh(), json.dumps({"event_id": fresh(), "type": "payment.created"})
    signature = base64.b64encode(mac(key, url("square") + body).digest()).decode()
    assert verify_signature(
        request_body=body, signature_header=signature, signature_key=key, notification_url=url("square")
    )
    request("square", "square", [key], {"x-square-hmacsha256-signature": signature}, body)


def plivo():
    from plivo.utils import validate_signature

    token, nonce = fresh(), fresh()
    signature = base64.b64encode(mac(token, url("plivo-v2") + nonce).digest()).decode()
    assert validate_signature(url("plivo-v2"), nonce, signature, token)
    body = urllib.parse.urlencode({"MessageUUID": fresh(), "Status": "delivered"})
    headers = {
        "Content-Type": "application/x-www-form-urlencoded",
        "X-Plivo-Signature-V2": signature,
        "X-Plivo-Signature-V2-Nonce": nonce,
    }
    request("plivo-v2", "plivo-v2", [token], headers, body, signs_body=False)


def line():
    from linebot.v3.webhook import SignatureValidator

    secret = fresh()
    events = [{"type": "message", "webhookEventId": fresh(), "message": {"text": "こんにちは"}} for _ in range(2)]
    body = json.dumps({"destination": "U1", "events": events}, ensure_ascii=False)
    signature = base64.b64encode(mac(secret, body).digest()).decode()
    assert SignatureValidator(secret).validate(body, signature)
    request("line", "line", [secret], {"x-line-signature": signature}, body)


def sendgrid():
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from sendgrid.helpers.eventwebhook import EventWebhook

    private = ec.generate_private_key(ec.SECP256R1())
    der = private.public_key().public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    public = base64.b64encode(der).decode()
    events = ",\r\n".join(json.dumps({"sg_event_id": fresh(), "event": "delivered"}) for _ in range(2))
    body, stamp = f"[{events}]\r\n", str(NOW)
    signature = base64.b64encode(private.sign((stamp + body).encode(), ec.ECDSA(hashes.SHA256()))).decode()
    assert EventWebhook(public).verify_signature(body, signature, stamp)
    prefix = "X-Twilio-Email-Event-Webhook-"
    request("sendgrid", "sendgrid", [public], {prefix + "Signature": signature, prefix + "Timestamp": stamp}, body)


def messagebird():
    import jwt
    from messagebird.request_validator import RequestValidator

    key, body = fresh() + fresh(), json.dumps({"id": fresh(), "status": "delivered"})
    claims = {
        "iss": "MessageBird",
        "nbf": NOW,
        "exp": NOW + 60,
        "jti": str(uuid.uuid4()),
        "url_hash": hashlib.sha256(url("messagebird", "?a=1").encode()).hexdigest(),
        "payload_hash": hashlib.sha256(body.encode()).hexdigest(),
    }
    token = jwt.encode(claims, key, "HS384")
    RequestValidator(key).validate_signature(token, url("messagebird", "?a=1"), body.encode())
    request("messagebird", "messagebird", [key], {"MessageBird-Signature-JWT": token}, body, "?a=1")


def truelayer():
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from truelayer_signing import HttpMethod, sign_with_pem, verify_with_pem

    private = ec.generate_private_key(ec.SECP521R1())
    pem = private.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ).decode()
    public = private.public_key()
    public = public.public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    ).decode()
    body = json.dumps({"type": "payment_executed", "event_id": str(uuid.uuid4())})
    stamp = datetime.datetime.fromtimestamp(NOW, datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    headers = {"X-Tl-Webhook-Timestamp": stamp, "Content-Type": "application/json"}
    signer = sign_with_pem("a-key", pem).set_method(HttpMethod.POST).set_path("/in/truelayer")
    for name, value in headers.items():
        signer = signer.add_header(name, value)
    signer = signer.set_jku("https://webhooks.truelayer.com/.well-known/jwks").set_body(body)
    signature = signer.sign()
    verifier = verify_with_pem(public).set_method(HttpMethod.POST).set_path("/in/truelayer").set_body(body)
    for name, value in headers.items():
        verifier = verifier.add_header(name, value)
    verifier.verify(signature)
    request("truelayer", "truelayer", [public.strip()], {**headers, "Tl-Signature": signature}, body)


for provider in [
    stripe,
    standard_webhooks,
    svix,
    twilio,
    slack,
    hubspot,
    braintree,
    adyen,
    box,
    github,
    razorpay,
    easypost,
    square,
    plivo,
    line,
    sendgrid,
    messagebird,
    truelayer,
]:
    provider()

json.dump(REQUESTS, sys.stdout)
